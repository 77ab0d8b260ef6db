// Products of rows of experts' weights with few vectors, at the speed of memory: weights are copied to shared memory far
// ahead, so that the bytes in flight do not depend on registers or on how many warps run.
#pragma once
#include "expert_groups.cuh"
#include "mbarrier.cuh"
#include "tma.cuh"  // evict_first_policy

template <typename T>
struct Weights {
    const T* w;  // [experts, rows, k]
    const T* bias;  // [experts, rows] or null
    i64 w_expert_stride, w_row_stride;
    int rows, k;
};

// Copies 16 bytes to shared memory. They are the first that the L2 cache evicts: weights are read once.
__device__ inline void copy_async(void* to, const void* from, u64 policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;"
                 ::"r"(smem_address(to)), "l"(__cvta_generic_to_global(from)), "l"(policy) : "memory");
}

// A warp's way through the weights of a block. They are counted in lines of ROWS rows, `lines` for each group of
// assignments; the block has lines `begin` to `end`, and every WARPS-th of them is this warp's. row_of(line, r) is the
// r-th row of a line of an expert.
//
// A line is read in tiles of ROWS rows and VECS vectors for each lane, and STAGES tiles are in flight. EVEN_K: tiles fill
// a row. Tiles are copied by all lanes (cp.async): a lane multiplies what it copied itself, so it waits for its own
// copies alone. With BULK one lane copies row by row (bulk copies, from sm_90 on), and a barrier for each stage tells all
// lanes that its tile is there.
template <typename T, int SHARE, int ROWS, int VECS, int STAGES, int WARPS, bool EVEN_K, bool BULK, typename RowOf>
struct WeightStream {
    static constexpr int VEC = 16 / sizeof(T), STEP_K = 32 * VEC, TILE_K = VECS * STEP_K;
    static constexpr int TILE = ROWS * VECS * 32;  // vectors of 16 bytes
    static constexpr int BYTES = WARPS * STAGES * (TILE * 16 + (BULK ? sizeof(Mbarrier) : 0));  // of a block
    struct Place {
        int index, group, line;

        __device__ void advance(int lines) {
            index += WARPS;
            for (line += WARPS; line >= lines; ++group) line -= lines;
        }
    };

    const Weights<T>& weights;
    const ExpertGroups<SHARE>& groups;
    const RowOf row_of;
    const int lines, end, lane_k = threadIdx.x % 32 * VEC;  // lane_k: this lane's place in a tile
    const u64 policy = evict_first_policy();
    uint4* const ring;  // this lane's
    Mbarrier* const full;  // this warp's
    Place place, ahead;  // of what is multiplied, and of what is copied
    const T* from[ROWS];  // what is copied next
    int ahead_k = 0, stage = 0, phase = 1;  // phase: of the barriers, which turns with the ring

    __device__ WeightStream(unsigned char* smem, const Weights<T>& weights, const ExpertGroups<SHARE>& groups, RowOf row_of,
                            int lines, int begin, int end)
        : weights(weights), groups(groups), row_of(row_of), lines(lines), end(end),
          ring(reinterpret_cast<uint4*>(smem) + threadIdx.x / 32 * (STAGES * TILE) + threadIdx.x % 32),
          full(reinterpret_cast<Mbarrier*>(smem + WARPS * STAGES * TILE * 16) + threadIdx.x / 32 * STAGES) {
        const int index = begin + static_cast<int>(threadIdx.x) / 32;
        place = ahead = {index, index / lines, index % lines};
        if (index < end) find_rows();
    }
    // Begins to copy.
    template <bool SIGNALS>
    __device__ void fill() {
        if constexpr (BULK) {
            if (lane_k == 0) {
                for (int s = 0; s < STAGES; ++s) full[s].init();
                fence_mbarrier_init();
            }
            __syncwarp();
        }
#pragma unroll 1
        for (int s = 0; s < STAGES; ++s) copy_next<SIGNALS>();
    }
    // Multiplies. vector_of(a) is the vector of assignment a. visit(group, line, sums, n, bias) gets the sums of the
    // group's n assignments, in every lane.
    template <typename VectorOf, typename Visit>
    __device__ void run(VectorOf vector_of, Visit visit) {
        for (; place.index < end; place.advance(lines)) {
            const T* vectors[SHARE];
            int n = 0;
#pragma unroll
            for (int i = 0; i < SHARE; ++i) {
                const int member = groups.members[place.group][i];
                n += member >= 0;
                vectors[i] = vector_of(max(member, 0)) + lane_k;
            }
            float sums[SHARE][ROWS] = {}, bias[ROWS] = {};
            T loaded_bias[ROWS];  // converted behind the loop, which does not wait for it
            if (weights.bias) {
                const T* const own = weights.bias + i64{groups.expert[place.group]} * weights.rows;
#pragma unroll
                for (int r = 0; r < ROWS; ++r) loaded_bias[r] = own[row_of(place.line, r)];
            }
#pragma unroll 1
            for (int k = 0; k < weights.k; k += TILE_K) {
                if constexpr (BULK) full[stage].wait(phase);
                else asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
#pragma unroll
                for (int v = 0; v < VECS; ++v)
                    if (inside(k, v)) multiply(sums, vectors, n, v, k + v * STEP_K);
                if constexpr (BULK) __syncwarp();  // all lanes have read the tile
                copy_next<true>();
            }
#pragma unroll
            for (int i = 0; i < SHARE; ++i)
                if (i == 0 || i < n)
#pragma unroll
                    for (int r = 0; r < ROWS; ++r) sums[i][r] = warp_reduce<Sum>(sums[i][r]);
            if (weights.bias)
#pragma unroll
                for (int r = 0; r < ROWS; ++r) bias[r] = static_cast<float>(loaded_bias[r]);
            visit(place.group, place.line, sums, n, bias);
        }
    }

  private:
    __device__ bool inside(int k, int v) const { return EVEN_K || k + v * STEP_K + lane_k < weights.k; }
    __device__ uint4* slot(int r, int v) const { return ring + stage * TILE + (r * VECS + v) * 32; }

    __device__ void find_rows() {
        const T* const own = weights.w + groups.expert[ahead.group] * weights.w_expert_stride + lane_k;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) from[r] = own + row_of(ahead.line, r) * weights.w_row_stride;
    }
    __device__ void copy_tile() {
        if constexpr (BULK) {
            if (lane_k > 0) return;
            const unsigned bytes = min(TILE_K, weights.k - ahead_k) * sizeof(T);
            full[stage].arrive_expect_tx(bytes * ROWS);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) full[stage].bulk_load(slot(r, 0), from[r], bytes);
        } else {
#pragma unroll
            for (int v = 0; v < VECS; ++v)
                if (inside(ahead_k, v))
#pragma unroll
                    for (int r = 0; r < ROWS; ++r) copy_async(slot(r, v), from[r] + v * STEP_K, policy);
        }
    }
    // Copies the next tile, if there is one, over the one that was multiplied. With the last tile it signals the
    // dependents, which start while the tiles in flight are multiplied.
    template <bool SIGNALS>
    __device__ void copy_next() {
        if (ahead.index < end) {
            copy_tile();
#pragma unroll
            for (int r = 0; r < ROWS; ++r) from[r] += TILE_K;
            ahead_k += TILE_K;
            if (ahead_k >= weights.k) {
                ahead_k = 0;
                ahead.advance(lines);
                if (ahead.index < end) find_rows();
                else if constexpr (SIGNALS) pdl_launch_dependents();
            }
        }
        // A group of copies in any case: their number tells which tile has landed.
        if constexpr (!BULK) asm volatile("cp.async.commit_group;" ::: "memory");
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
    __device__ void multiply(float (&sums)[SHARE][ROWS], const T* const (&vectors)[SHARE], int n, int v, int k) const {
        float rows[ROWS][VEC], x[VEC];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) load(rows[r], reinterpret_cast<const T*>(slot(r, v)));
#pragma unroll
        for (int i = 0; i < SHARE; ++i) {
            if (i > 0 && i >= n) break;  // a group has one at least
            load(x, vectors[i] + k);
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
#pragma unroll
                for (int e = 0; e < VEC; ++e) sums[i][r] = fmaf(rows[r][e], x[e], sums[i][r]);
        }
    }
};
