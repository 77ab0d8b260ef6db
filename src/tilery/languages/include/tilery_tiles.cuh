// Tiles of c on their way out of the registers: row by row, by TMA through shared memory, or added up in a cluster.
#pragma once
#include "tilery_wgmma.cuh"

// Four words of each of a quad's threads, transposed: thread q gets the others' q-th, in their order.
__device__ inline void transpose_quad(unsigned (&words)[4]) {
#pragma unroll
    for (int bit = 1; bit < 4; bit *= 2) {
        const bool upper = threadIdx.x & bit;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i & bit) continue;
            const unsigned got = __shfl_xor_sync(0xffffffff, upper ? words[i] : words[i | bit], bit);
            (upper ? words[i] : words[i | bit]) = got;
        }
    }
}

// One row of 2 · COUNT columns from `left` on, of which this thread has pairs, 4 sums apart, from `first` on; of those the
// eights from BEGIN to END, -1 for all. Every thread of a warp calls it; what is not `inside` is not stored.
template <int BEGIN = 0, int END = -1, typename T, int COUNT>
__device__ __forceinline__ void store_row(T* row, int left, int n, bool inside, const float (&sums)[COUNT], int first) {
    constexpr int GROUPS = END < 0 ? COUNT / 4 : END;
    const int quad = threadIdx.x % 4;
    int g = BEGIN;
    if constexpr (sizeof(T) == 2) {
        if (n % 8 == 0) {  // 16 bytes a thread, 64 a quad
#pragma unroll
            for (; g + 4 <= GROUPS; g += 4) {
                unsigned words[4];
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    words[i] = Pack<T, 2>::rounded({sums[4 * (g + i) + first], sums[4 * (g + i) + first + 1]}).bits();
                transpose_quad(words);
                const int col = left + 8 * (g + quad);
                if (inside && col < n) store_word(row + col, uint4{words[0], words[1], words[2], words[3]});
            }
        }
    }
#pragma unroll
    for (int rest = BEGIN; rest < GROUPS; ++rest) {
        if (rest < g) continue;
        const int col = left + 8 * rest + 2 * quad;
        const float pair[2] = {sums[4 * rest + first], sums[4 * rest + first + 1]};
        if (!inside || col >= n) continue;
        if (n % 2 == 0) {
            store(row + col, pair);
        } else {
            row[col] = static_cast<T>(pair[0]);
            if (col + 1 < n) row[col + 1] = static_cast<T>(pair[1]);
        }
    }
}

// A box as load_tile brings it, from shared memory to (column, row); what is outside is not stored. Threads that wrote it
// say so with `tile_written`, meet, and then one of them stores. It may be written again after `tiles_stored`.
__device__ inline void store_tile(const TensorMap& map, const void* from, int column, int row) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];"
                 ::"l"(&map), "r"(shared_address(from)), "r"(column), "r"(row) : "memory");
}
__device__ inline void tile_written() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ inline void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ inline void tiles_stored() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// Threads of one warpgroup meet.
__device__ inline void warpgroup_meet(int warpgroup) { asm volatile("bar.sync %0, 128;" ::"r"(1 + warpgroup) : "memory"); }

// The 64 rows of a warpgroup from `top` and the columns from `left` on, through shared memory of as many bytes at `mine`: the
// next tile is multiplied while they are stored. Ends with `tiles_stored` by the warpgroup's first thread.
template <typename T, int PARTS, int COUNT>
__device__ void store_staged(const TensorMap& map, unsigned char* mine, const float (&sums)[PARTS][COUNT], int warpgroup,
                             int left, int top) {
    constexpr int WIDTH = 2 * COUNT, CHUNK = SPAN / sizeof(T), BOX = 64 * SPAN;  // columns and bytes that are stored at once
    static_assert(sizeof(T) == 2 && PARTS * WIDTH % CHUNK == 0, "boxes of 64 columns");
    int thread = threadIdx.x % 128;
    asm volatile("" : "+r"(thread));  // or addresses would be kept in registers through all products
    if (thread == 0) tiles_stored();
    warpgroup_meet(warpgroup);
#pragma unroll
    for (int p = 0; p < PARTS; ++p)
#pragma unroll
        for (int r = 0; r < COUNT; r += 2) {  // a quad writes 16 bytes, the rows of a warp to 32 banks
            const int column = p * WIDTH + r / 4 * 8, line = thread / 32 * 16 + thread % 32 / 4 + r % 4 * 4;
            unsigned char* const at = mine + column / CHUNK * BOX + line * SPAN +
                                      ((column % CHUNK / 8) ^ (line % 8)) * 16 + thread % 4 * 4;
            *reinterpret_cast<unsigned*>(at) = Pack<T, 2>::rounded({sums[p][r], sums[p][r + 1]}).bits();
        }
    tile_written();
    warpgroup_meet(warpgroup);
    if (thread == 0) {
#pragma unroll
        for (int j = 0; j < PARTS * WIDTH / CHUNK; ++j) store_tile(map, mine + j * BOX, left + j * CHUNK, top);
        store_commit();
    }
}

// Writes to `place` of the block with that rank in the cluster, whose `arrival` counts the bytes.
__device__ inline void push(float4* place, Arrival& arrival, int rank, float4 value) {
    asm volatile("{ .reg .b32 there, counted; mapa.shared::cluster.u32 there, %0, %2; mapa.shared::cluster.u32 counted, %1, %2;\n"
                 "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [there], {%3, %4, %5, %6}, [counted]; }"
                 ::"r"(shared_address(place)), "r"(shared_address(&arrival.state)), "r"(rank),
                   "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w) : "memory");
}

// A tile of BN columns whose parts are in the registers of two warpgroups in each of SPLITS blocks of a cluster. Every block adds
// up a share of the columns, eight by eight: its own part first, then the others' in the order of their ranks.
template <int BN, int SPLITS>
struct SharedColumns {
    static constexpr int EIGHTS = BN / 8, MOST = (EIGHTS + SPLITS - 1) / SPLITS, THREADS = 256;  // four sums a thread
    static constexpr int BYTES = (SPLITS - 1) * MOST * THREADS * 16;  // for parts from the others

    // visit(share, rank): the compiler must know which sums a share has.
    template <int RANK>
    struct Share {
        static constexpr int BEGIN = EIGHTS * RANK / SPLITS, END = EIGHTS * (RANK + 1) / SPLITS;
    };
    template <int RANK = 0, typename Visit>
    static __device__ __forceinline__ void each(Visit visit) {
        visit(Share<RANK>{}, RANK);
        if constexpr (RANK + 1 < SPLITS) each<RANK + 1>(visit);
    }

    // Of one thread, before the blocks meet.
    static __device__ void expect(Arrival& sent, int rank) {
        sent.init();
        sent.expect((SPLITS - 1) * (EIGHTS * (rank + 1) / SPLITS - EIGHTS * rank / SPLITS) * THREADS * 16);
    }
    // Of all threads that multiply, while the others call `meet` of the cluster; `place` is free when all have come.
    static __device__ __forceinline__ void add_up(float (&sums)[BN / 2], int rank, float4* place, Arrival& sent) {
        float4* const mine = place + threadIdx.x;
        Cluster<SPLITS>::meet();
        each([&](auto share, int to) {
            if (to == rank) return;
            float4* const there = mine + (rank - (rank > to)) * MOST * THREADS;
#pragma unroll
            for (int e = share.BEGIN; e < share.END; ++e)
                push(there + (e - share.BEGIN) * THREADS, sent, to,
                     {sums[4 * e], sums[4 * e + 1], sums[4 * e + 2], sums[4 * e + 3]});
        });
        sent.wait(0);
        each([&](auto share, int own) {
            if (own != rank) return;
#pragma unroll
            for (int e = share.BEGIN; e < share.END; ++e)
#pragma unroll
                for (int p = 0; p < SPLITS - 1; ++p) {
                    const float4 other = mine[(p * MOST + e - share.BEGIN) * THREADS];
                    sums[4 * e] += other.x, sums[4 * e + 1] += other.y, sums[4 * e + 2] += other.z, sums[4 * e + 3] += other.w;
                }
        });
    }
};

// Where few rows of a are cut: tiles of TOKENS × BN, for clusters of SPLITS blocks that share K. Those have one tile, other
// blocks go on until there are none.
template <int TOKENS, int BN, int SPLITS>
struct FewTiles {
    int rank, start, stride, across, count;
    int begin, slots;  // of K, of this block

    __device__ FewTiles(int m, int n, int all)
        : rank(Cluster<SPLITS>::rank()), start(blockIdx.x / SPLITS), stride(gridDim.x / SPLITS), across((n + BN - 1) / BN),
          count(across * ((m + TOKENS - 1) / TOKENS)), begin(all * rank / SPLITS), slots(all * (rank + 1) / SPLITS - begin) {}
    __device__ int left(int t) const { return t % across * BN; }
    __device__ int first(int t) const { return t / across * TOKENS; }
    // visit(slot of K) of tile t. Very few tokens: each tile begins elsewhere, so that not all blocks ask for the same columns,
    // and so for the same banks of memory, at once. More tokens are better found in the L2, where others just fetched them.
    template <typename Visit>
    __device__ void each(int t, Visit visit) const {
        int s = TOKENS <= 16 && slots > 0 ? t % slots : 0;
        for (int i = 0; i < slots; ++i) {
            visit(begin + s);
            if (++s == slots) s = 0;
        }
    }
};

// Eight by eight values of two bytes, a pair a thread, transposed: thread 4 i + j has (i, 2 j) and (i, 2 j + 1).
__device__ inline unsigned transposed(unsigned pair) {
    unsigned made;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(made) : "r"(pair));
    return made;
}

// The tile of a warpgroup that has WIDTH columns of c where wgmma has rows, from `left` on, and tokens where it has columns,
// from `first` on, straight from the registers.
template <int WIDTH, typename T, int COUNT>
__device__ void store_columns(const float (&sums)[COUNT], T* c, int first, int left, int m, int n) {
    const int skip = threadIdx.x / 32 % 4 * 16, line = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
    if (skip >= WIDTH) return;
    if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int r = 0; r < COUNT; ++r) {
            const int token = first + r / 4 * 8 + quad * 2 + r % 2, own = skip + r % 4 / 2 * 8 + line;
            if (own < WIDTH && left + own < n && token < m) c[i64{token} * n + left + own] = sums[r];
        }
    } else {
        constexpr int GROUPS = COUNT / 4, STEP = GROUPS > 1 ? 2 : 1;  // of eight tokens
#pragma unroll
        for (int g = 0; g < GROUPS; g += STEP) {
            unsigned words[4];
#pragma unroll
            for (int i = 0; i < 2 * STEP; ++i)
                words[i] = transposed(Pack<T, 2>::rounded({sums[4 * g + 2 * i], sums[4 * g + 2 * i + 1]}).bits());
            if (STEP == 2 && n % 8 == 0) {  // 16 bytes a thread
                transpose_quad(words);
                const int token = first + (g + quad / 2) * 8 + line, own = skip + quad % 2 * 8;
                if (own < WIDTH && left + own < n && token < m)
                    store_word(c + i64{token} * n + left + own, uint4{words[0], words[1], words[2], words[3]});
                continue;
            }
#pragma unroll
            for (int i = 0; i < 2 * STEP; ++i) {
                const int token = first + (g + i / 2) * 8 + line, own = skip + i % 2 * 8 + quad * 2;
                if (own >= WIDTH || left + own >= n || token >= m) continue;
                T* const to = c + i64{token} * n + left + own;
                Pack<T, 2> pair;
                memcpy(&pair, &words[i], sizeof(pair));
                if (n % 2 == 0) {
                    pair.to_global(to);
                } else {
                    to[0] = pair.at[0];
                    if (left + own + 1 < n) to[1] = pair.at[1];
                }
            }
        }
    }
}

// A tile of TOKENS × BN whose parts are in the registers of SPLITS blocks of a cluster, transposed: warpgroups have WIDTH of the
// BN columns each. Every block adds up a share of the tile that the others send to it, always in the same order.
template <typename T, int TOKENS, int WARPGROUPS, int WIDTH, int SPLITS, int THREADS>
struct SharedTile {
    static constexpr int BN = WARPGROUPS * WIDTH, COUNT = TOKENS / 2;  // sums a thread
    static constexpr int LINE = BN + 4;  // floats from token to token: a warp writes to 32 banks
    static constexpr int FOURS = TOKENS * BN / 4 / SPLITS;  // of columns, that a block adds up
    static constexpr int OWN_BYTES = TOKENS * LINE * 4, SENT_BYTES = SPLITS > 1 ? SPLITS * FOURS * 16 : 0;
    using cluster = Cluster<SPLITS>;

    // Of one thread, before the blocks begin.
    static __device__ void expect(Arrival& sent) {
        if constexpr (SPLITS > 1) {
            sent.init();
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
            sent.expect((SPLITS - 1) * FOURS * 16);
        }
    }
    // Of all threads; the tile's first is token `first` and column `left` of c [m, n]. `finish(four, token, column)` may change
    // four sums before they are stored.
    template <typename Finish>
    static __device__ void store(const float (&sums)[COUNT], float* mine, void* others, Arrival& sent, T* c, int first, int left,
                                 int m, int n, Finish finish) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = cluster::rank();
        const auto got = reinterpret_cast<float4(*)[FOURS]>(others);
        const auto four_at = [&](int e) { return reinterpret_cast<float4*>(mine + e / (BN / 4) * LINE + e % (BN / 4) * 4); };
        if (warp < WARPGROUPS * 4) {
            const int row = warp % 4 * 16 + lane / 4, quad = lane % 4;
#pragma unroll
            for (int r = 0; r < COUNT; ++r) {
                const int own = row + r % 4 / 2 * 8;
                if (own < WIDTH) mine[(r / 4 * 8 + quad * 2 + r % 2) * LINE + warp / 4 * WIDTH + own] = sums[r];
            }
        }
        __syncthreads();
        if constexpr (SPLITS > 1) {
            cluster::wait_for_start();
#pragma unroll
            for (int p = 1; p < SPLITS; ++p) {
                const int to = (rank + p) % SPLITS;
                for (int e = threadIdx.x; e < FOURS; e += THREADS) push(got[rank] + e, sent, to, *four_at(to * FOURS + e));
            }
            sent.wait(0);
        }
        for (int e = threadIdx.x; e < FOURS; e += THREADS) {
            const int at = rank * FOURS + e, t = first + at / (BN / 4), col = left + at % (BN / 4) * 4;
            float four[4] = {};
#pragma unroll
            for (int p = 0; p < SPLITS; ++p) {
                const float4 one = p == rank ? *four_at(at) : got[p][e];
                four[0] += one.x, four[1] += one.y, four[2] += one.z, four[3] += one.w;
            }
            if (t >= m) continue;
            finish(four, t, col);
            T* const to = c + i64{t} * n + col;
            if (n % 4 == 0) {
                if (col < n) ::store(to, four);
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (col + i < n) to[i] = static_cast<T>(four[i]);
            }
        }
    }
};
