// Multi-head latent attention of a few query tokens on Hopper by TMA and wgmma, in the latent: a key is 512 columns of the
// latent and 64 turned ones, and the latent is its value too. Blocks of 64 keys are loaded once and used as both.
//
// A block has 64 rows (query tokens times heads) of one sequence and one split of its keys. Its warpgroups are a pipeline:
//
//   producer (one warp)   loads q, then blocks of keys in parts: turned columns, left and right half of the latent
//   softmax warpgroup     S = Q · Kᵀ, masks and online softmax; hands P and rescale factors on in shared memory
//   two value warpgroups  O = O · rescale + P · V, each for its half of the latent: 64 × 256 accumulators
//
// So S of one block runs while P · V of the block before does, and each role waits for nothing but what it needs: a
// stage's half is loaded anew as soon as its values were used, which keeps loads in flight where memory is the limit.
#include "attention_mainloop.cuh"

template <typename T>
struct MlaDecodeParams {
    const int* page_table;  // [sequences, pages of a sequence]; null: the keys of sequence b are page b
    const int* seqlens_k;
    T* out;  // [sequences, rows, LATENT]; written, as lse, if there are no splits
    float* lse;  // [sequences, heads, queries]
    float* partial_out;  // [splits, rows of all sequences, LATENT]; null if there are no splits
    float* partial_stats;  // [2, splits, rows of all sequences]: maxima and sums
    i64 page_table_stride;
    int sequences;
    int heads;
    int queries;  // tokens of a sequence; row r is token r / heads and head r % heads
    int row_tiles;  // of a sequence
    int splits;
    int target_splits;  // a sequence's keys are split so many ways; never fewer than `splits`
    int min_blocks_per_split;  // key blocks: see KeyBlocks::restrict_to_split
    int page_size;  // 16 or more, a power of two
    int pages;  // of the cache
    int max_seqlen_k;
    float softmax_scale;
};

// PART: columns of a wgmma of P · V. ptxas refuses one of 256: it would need more than the 128 registers that each of 512
// threads starts with.
constexpr int LATENT = 512, HALF = LATENT / 2, PART = HALF / 2, ROWS = 64, KEYS = 64, STAGES = 2;
constexpr int CHUNK_COLS = 64, CHUNK_BYTES = KEYS * SWIZZLE_BYTES;  // 64 rows of 64 columns: of q, of keys, and P
constexpr int LATENT_CHUNKS = LATENT / CHUNK_COLS, HALF_CHUNKS = LATENT_CHUNKS / 2;
constexpr int VALUE_WARPGROUPS = 2, SOFTMAX_WARPGROUP = 2, PRODUCER_WARPGROUP = 3, THREADS = 512;
// All registers of an SM are used: the accumulators of a value warpgroup are 128 of its registers.
constexpr int PRODUCER_REGISTERS = 40, SOFTMAX_REGISTERS = 152, VALUE_REGISTERS = 160;
constexpr int NO_KEY = 0x7fffffff;  // behind every key

using RopePipeline = TilePipeline<STAGES, CHUNK_BYTES>;
using HalfPipeline = TilePipeline<STAGES, HALF_CHUNKS * CHUNK_BYTES>;
using QPipeline = TilePipeline<1, (LATENT_CHUNKS + 1) * CHUNK_BYTES>;
using PPipeline = TilePipeline<1, CHUNK_BYTES>;

// What is handed on beside tiles.
struct Handoff {
    float rescale[ROWS];  // with P: factors for the output so far. The last ones come without P, and are 1 / row_sum
    int first_missing;  // with the last block of keys: the first key whose page is not in the cache
};

// Rows from `first` on and the keys of one split that they see. `position` is that of row 0 among the keys.
struct MlaTile {
    int sequence, split, first, rows, position, keys;
    bool valid;  // whether the sequence's length is; if not it has no keys
    KeyBlocks blocks;

    // A row's number among those of all sequences.
    __device__ i64 out_row(int row) const { return i64{sequence} * rows + row; }
    // How a sequence is split depends on its own length alone, so it gives the same bits in any batch. Neighbours take
    // the same keys, from L2.
    template <typename T>
    static __device__ MlaTile of(int t, const MlaDecodeParams<T>& p) {
        const int column = t / p.row_tiles, sequence = column / p.splits, length = p.seqlens_k[sequence];
        const bool valid = length >= 0 && length <= p.max_seqlen_k;
        const int keys = valid ? length : 0, position = keys - p.queries;
        MlaTile tile{sequence, column % p.splits, t % p.row_tiles * ROWS, p.queries * p.heads, position, keys, valid,
                     {{0, 0}, {0, 0}}};
        const int last = min(position + (tile.first + ROWS - 1) / p.heads, keys - 1);
        tile.blocks = KeyBlocks::of<KEYS>(position + tile.first / p.heads, last, keys, keys + p.queries, 0);
        tile.blocks.restrict_to_split(tile.split, 0, (keys + KEYS - 1) / KEYS, p.target_splits, p.min_blocks_per_split);
        return tile;
    }
};

// The pipelines between the warpgroups, in shared memory. Each role has its own copy.
struct MlaPipelines {
    static constexpr int BARRIERS = STAGES * 16;
    static constexpr int Q_AND_P = (LATENT_CHUNKS + 2) * CHUNK_BYTES;
    HalfPipeline left, right;
    RopePipeline rope;
    QPipeline q;
    PPipeline p;
    Handoff* handoff;

    // Tiles, which are aligned, lie before all barriers.
    __device__ explicit MlaPipelines(unsigned char* smem)
        : left(smem, (HALF_CHUNKS + 1) * STAGES * CHUNK_BYTES + Q_AND_P),
          right(left.after_tiles(), STAGES * CHUNK_BYTES + Q_AND_P + BARRIERS),
          rope(right.after_tiles(), Q_AND_P + 2 * BARRIERS), q(rope.after_tiles(), CHUNK_BYTES + 3 * BARRIERS),
          p(q.after_tiles(), 3 * BARRIERS + 16), handoff(reinterpret_cast<Handoff*>(p.empty + 1)) {}
    __device__ void init() {
        left.init(8), right.init(8);  // both the softmax warpgroup and the one with these values release a half
        rope.init(4), q.init(4), p.init(VALUE_WARPGROUPS * 4);
        handoff->first_missing = NO_KEY;
    }
};

// Loads q and the split's blocks of keys. A lane loads one box of a half: rows of one page and a chunk of columns.
// What lies outside of the cache is zeros; rows that see a key of it become NaN in the end.
template <typename T>
__device__ __forceinline__ void load_tiles(const MlaDecodeParams<T>& p, const MlaTile& tile, MlaPipelines& pipes,
                                           const TensorMap& q_map, const TensorMap& q_rope_map,
                                           const TensorMap& cache_map) {
    const Range blocks = tile.blocks.visible;
    const u64 kept = evict_normal_policy(), policy = p.row_tiles == 1 ? evict_first_policy() : kept;
    const int lane = threadIdx.x % 32, box_rows = min(p.page_size, KEYS), box = lane % 4, chunk = lane / 4;
    const int row = box * box_rows;
    const bool loads = row < KEYS;
    const int* const pages = p.page_table + tile.sequence * p.page_table_stride;
    // Entries behind the last key are not read.
    const auto page_of = [&](int block) {
        const int key = block * KEYS + row;
        if (block >= blocks.end || !loads || key >= tile.keys) return -1;
        return p.page_table ? pages[key / p.page_size] : tile.sequence;
    };
    if (blocks.begin == blocks.end) return;
    if (lane == 0) {
        Mbarrier& full = pipes.q.producer_acquire();
#pragma unroll 1
        for (int c = 0; c < LATENT_CHUNKS; ++c)
            tma_load_3d<false>(kept, 0, full, pipes.q.tile() + c * CHUNK_BYTES, q_map, c * CHUNK_COLS, tile.first,
                               tile.sequence);
        tma_load_3d<false>(kept, 0, full, pipes.q.tile() + LATENT_CHUNKS * CHUNK_BYTES, q_rope_map, 0, tile.first,
                           tile.sequence);
    }
    int next_page = page_of(blocks.begin), first_missing = NO_KEY;  // pages are looked up one block before they are loaded
#pragma unroll 1
    for (int b = blocks.begin; b < blocks.end; ++b) {
        const int key = b * KEYS + row, row_in_page = key & (p.page_size - 1);
        int page = next_page;
        next_page = page_of(b + 1);
        if (loads && key < tile.keys && static_cast<unsigned>(page) >= static_cast<unsigned>(p.pages))
            first_missing = min(first_missing, key), page = -1;
        if (b == blocks.end - 1) {  // seen by the consumers with the last block: the barriers' arrivals come behind it
            first_missing = min(first_missing, __shfl_xor_sync(0xffffffff, first_missing, 1));
            first_missing = min(first_missing, __shfl_xor_sync(0xffffffff, first_missing, 2));
            if (lane == 0) pipes.handoff->first_missing = first_missing;
        }
        const auto load_part = [&](auto& part, int chunks, int first_chunk) {
            part.wait_empty();
            Mbarrier& full = part.full[part.stage];
            if (lane == 0) full.arrive_expect_tx(chunks * CHUNK_BYTES);
            __syncwarp();
            if (const int c = loads ? (chunk - first_chunk) & (LATENT_CHUNKS - 1) : LATENT_CHUNKS; c < chunks)
                tma_load_3d<false>(policy, 0, full, part.tile() + c * CHUNK_BYTES + row * SWIZZLE_BYTES, cache_map,
                                   (first_chunk + c) * CHUNK_COLS, row_in_page, page);
            part.advance();
        };
        load_part(pipes.rope, 1, LATENT_CHUNKS);
        load_part(pipes.left, HALF_CHUNKS, 0);
        load_part(pipes.right, HALF_CHUNKS, HALF_CHUNKS);
    }
}

// Computes S and P of every block and hands P on; then writes lse, or maxima and sums of a split.
template <typename T>
__device__ __forceinline__ void compute_probabilities(const MlaDecodeParams<T>& p, const MlaTile& tile,
                                                      MlaPipelines& pipes) {
    using Wgmma = WgmmaSS<typename WgmmaType<T>::type, typename WgmmaType<T>::type, KEYS>;
    const Range blocks = tile.blocks.visible;
    const int lane = threadIdx.x % 32, row0 = threadIdx.x / 32 % 4 * 16 + lane / 4, quad_lane = lane % 4;
    const int positions[2] = {tile.position + (tile.first + row0) / p.heads,
                              tile.position + (tile.first + row0 + 8) / p.heads};
    const TileMask mask{tile.blocks, {positions[0], positions[1]}, tile.keys, tile.keys + p.queries, 0, true};
    const ScoreScale scale(p.softmax_scale);
    OnlineSoftmax softmax;
    float scores[KEYS / 2];
    // Hands on factors of this thread's rows, and P if it was written.
    const auto hand_on = [&](const float (&factors)[2]) {
        if (quad_lane == 0) pipes.handoff->rescale[row0] = factors[0], pipes.handoff->rescale[row0 + 8] = factors[1];
        fence_async_proxy();
        warpgroup_sync(SOFTMAX_WARPGROUP);
        if (threadIdx.x % 128 == 0) pipes.p.full->arrive();
        pipes.p.advance();
    };
    if (blocks.begin < blocks.end) pipes.q.consumer_wait();
#pragma unroll 1
    for (int b = blocks.begin; b < blocks.end; ++b) {
        warpgroup_arrive(scores);
        const auto issue_qk = [&](auto& part, int first_chunk, int chunks) {
            part.consumer_wait();
#pragma unroll
            for (int s = 0; s < chunks * 4; ++s)
                Wgmma::mma(scores, smem_desc_k_major(pipes.q.tile() + (first_chunk + s / 4) * CHUNK_BYTES) + s % 4 * 2,
                           smem_desc_k_major(part.tile() + s / 4 * CHUNK_BYTES) + s % 4 * 2,
                           first_chunk < LATENT_CHUNKS || s > 0);
        };
        issue_qk(pipes.rope, LATENT_CHUNKS, 1);
        issue_qk(pipes.left, 0, HALF_CHUNKS);
        issue_qk(pipes.right, HALF_CHUNKS, HALF_CHUNKS);
        warpgroup_commit_batch();
        warpgroup_wait_all(scores);
        pipes.rope.consumer_release(), pipes.left.consumer_release(), pipes.right.consumer_release();
        pipes.rope.advance(), pipes.left.advance(), pipes.right.advance();
        mask.apply<KEYS>(scores, b, scale);
        softmax.update(scores, scale.log2);
        pipes.p.wait_empty();
        store_swizzled<T>(pipes.p.tile(), scores, 0, threadIdx.x % 128);
        hand_on(softmax.rescale);
    }
    softmax.reduce_row_sum();
    const int first_missing = pipes.handoff->first_missing;
    float factors[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int row = tile.first + row0 + 8 * h;
        const float row_sum = tile.valid && positions[h] < first_missing ? softmax.row_sum[h] : quiet_nan();
        factors[h] = p.partial_out ? 1.0f : row_sum == 0.0f ? 0.0f : 1.0f / row_sum;
        if (quad_lane != 0 || row >= tile.rows) continue;
        if (p.partial_out) {
            const i64 all_rows = i64{p.sequences} * tile.rows, at = tile.split * all_rows + tile.out_row(row);
            p.partial_stats[at] = softmax.row_max[h];
            p.partial_stats[p.splits * all_rows + at] = row_sum;
        } else {
            p.lse[(i64{tile.sequence} * p.heads + row % p.heads) * p.queries + row / p.heads] =
                log_sum_exp(softmax.row_max[h], row_sum);
        }
    }
    pipes.p.wait_empty();
    hand_on(factors);
}

// Sums P · V over the blocks for one half of the latent and writes it. `values` is the pipeline of that half.
template <typename T>
__device__ __forceinline__ void accumulate_values(const MlaDecodeParams<T>& p, const MlaTile& tile, HalfPipeline values,
                                                  PPipeline probabilities, const Handoff& handoff, int warpgroup) {
    using Wgmma = WgmmaSS<typename WgmmaType<T>::type, typename WgmmaType<T>::type, PART>;
    const Range blocks = tile.blocks.visible;
    const int row0 = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    float acc[2][PART / 2];
#pragma unroll
    for (int i = 0; i < PART; ++i) acc[i / (PART / 2)][i % (PART / 2)] = 0.0f;
    const auto rescale = [&] {
        const float factors[2] = {handoff.rescale[row0], handoff.rescale[row0 + 8]};
        if (!__any_sync(0xffffffff, factors[0] != 1.0f || factors[1] != 1.0f)) return;
#pragma unroll
        for (int i = 0; i < PART; ++i) acc[i / (PART / 2)][i % (PART / 2)] *= factors[i / 2 % 2];
    };
#pragma unroll 1
    for (int b = blocks.begin; b < blocks.end; ++b) {
        probabilities.consumer_wait();
        rescale();
        values.consumer_wait();  // over already: S was computed of them
        if ((b + 1) * KEYS > tile.keys) zero_rows<KEYS, HALF_CHUNKS>(values.tile(), tile.keys - b * KEYS, warpgroup);
        warpgroup_fence_operand(acc[1]), warpgroup_arrive(acc[0]);
        const u64 p_desc = smem_desc_k_major(probabilities.tile());
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u64 v_desc = smem_desc_mn_major(values.tile() + i * HALF_CHUNKS / 2 * CHUNK_BYTES, CHUNK_BYTES);
#pragma unroll
            for (int s = 0; s < KEYS / 16; ++s) Wgmma::template mma<0, 1>(acc[i], p_desc + s * 2, v_desc + s * 128, 1);
        }
        warpgroup_commit_batch();
        warpgroup_wait_all(acc[0]), warpgroup_fence_operand(acc[1]);
        values.consumer_release(), values.advance();
        probabilities.consumer_release(), probabilities.advance();
    }
    probabilities.consumer_wait();
    rescale();
    const bool no_keys = blocks.begin == blocks.end;  // then combine_splits skips this split
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int row = tile.first + row0 + 8 * h;
        const i64 out_row = tile.out_row(row), all_rows = i64{p.sequences} * tile.rows;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int column = warpgroup * HALF + i * PART;
            if (!p.partial_out)
                store_row(p.out + out_row * LATENT, column, LATENT, row < tile.rows, acc[i], 2 * h);
            else
                store_row(p.partial_out + (tile.split * all_rows + out_row) * LATENT, column, LATENT,
                          row < tile.rows && !no_keys, acc[i], 2 * h);
        }
    }
}

template <typename T>
__global__ void __launch_bounds__(THREADS, 1) mla_decode(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap q_rope_map,
    const __grid_constant__ TensorMap cache_map, const __grid_constant__ MlaDecodeParams<T> params) {
    extern __shared__ __align__(1024) unsigned char smem[];
    MlaPipelines pipes(smem);
    if (threadIdx.x == 0) {
        pipes.init();
        prefetch_tensor_map(q_map), prefetch_tensor_map(q_rope_map), prefetch_tensor_map(cache_map);
    }
    __syncthreads();
    pdl_wait();
    pdl_launch_dependents();
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), warpgroup = warp / 4;
    const MlaTile tile = MlaTile::of(blockIdx.x, params);
    if (warpgroup == PRODUCER_WARPGROUP) {
        decrease_registers<PRODUCER_REGISTERS>();
        if (warp == PRODUCER_WARPGROUP * 4) load_tiles(params, tile, pipes, q_map, q_rope_map, cache_map);
    } else if (warpgroup == SOFTMAX_WARPGROUP) {
        increase_registers<SOFTMAX_REGISTERS>();
        compute_probabilities(params, tile, pipes);
    } else {
        increase_registers<VALUE_REGISTERS>();
        accumulate_values(params, tile, warpgroup == 0 ? pipes.left : pipes.right, pipes.p, *pipes.handoff, warpgroup);
    }
}
