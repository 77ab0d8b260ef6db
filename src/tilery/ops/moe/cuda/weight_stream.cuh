// Products of rows of experts' weights with few vectors, at the speed of memory: weights are copied to shared memory far
// ahead (cp.async), so that the bytes in flight do not depend on registers or on how many warps run.
#pragma once
#include "expert_groups.cuh"
#include "tma.cuh"  // evict_first_policy

// Weights [experts, rows, k] and how a warp takes them: `lines` of ROWS rows for each expert. Blocks have equal parts.
template <typename T>
struct Weights {
    const T* w;
    const T* bias;  // [experts, rows] or null
    i64 w_expert_stride, w_row_stride;
    int rows, k;
};

// Copies 16 bytes to shared memory. They are the first that the L2 cache evicts: weights are read once.
__device__ inline void copy_async(void* to, const void* from, u64 policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;"
                 ::"r"(smem_address(to)), "l"(__cvta_generic_to_global(from)), "l"(policy) : "memory");
}

// A warp's way through lines. The first is `index`, counted through all groups of `lines` each, and WARPS lines on is the
// next, up to `end`. A line is read in tiles of ROWS rows and VECS vectors for each lane, which has STAGES tiles in
// flight. A lane multiplies what it copied itself, so it waits for its own copies alone.
template <typename T, int SHARE, int ROWS, int VECS, int STAGES, int WARPS>
struct WeightStream {
    static constexpr int VEC = 16 / sizeof(T), STEP_K = 32 * VEC, TILE_K = VECS * STEP_K;
    static constexpr int BYTES = WARPS * STAGES * ROWS * VECS * 512;  // shared memory of a block
    struct Place {
        int index, group, line;

        __device__ void advance(int lines) {
            index += WARPS;
            for (line += WARPS; line >= lines; ++group) line -= lines;
        }
    };

    const Weights<T>& weights;
    const ExpertGroups<SHARE>& groups;
    const int lane = threadIdx.x % 32, lines, end;
    Place place;  // of what is multiplied
    const u64 policy = evict_first_policy();

    Place ahead;  // of what is copied
    int ahead_k = 0, ahead_stage = 0, stage = 0;
    const T* from[ROWS];
    uint4* const ring;

    __device__ WeightStream(unsigned char* smem, const Weights<T>& weights, const ExpertGroups<SHARE>& groups, int lines,
                            int begin, int end)
        : weights(weights), groups(groups), lines(lines), end(end),
          ring(reinterpret_cast<uint4*>(smem) + threadIdx.x / 32 * (STAGES * ROWS * VECS * 32) + threadIdx.x % 32) {
        const int index = begin + static_cast<int>(threadIdx.x) / 32;
        place = {index, index / lines, index % lines};
        ahead = place;
    }
    // Begins the copies; row_of(line, r) is the r-th row of a line.
    template <bool SIGNALS, typename RowOf>
    __device__ void fill(RowOf row_of) {
        if (ahead.index < end) find_rows(row_of);
#pragma unroll 1
        for (int s = 0; s < STAGES; ++s) copy_next<SIGNALS>(row_of);
    }
    // Multiplies. vector_of(a) is the vector of assignment a; visit(group, line, sums, n, bias) gets the sums of the
    // group's n assignments, in every lane.
    template <typename RowOf, typename VectorOf, typename Visit>
    __device__ void run(RowOf row_of, VectorOf vector_of, Visit visit) {
        for (; place.index < end; place.advance(lines)) {
            const T* vectors[SHARE];
            int n = 0;
#pragma unroll
            for (int i = 0; i < SHARE; ++i) {
                const int member = groups.members[place.group][i];
                n += member >= 0;
                vectors[i] = vector_of(max(member, 0)) + lane * VEC;
            }
            float bias[ROWS] = {}, sums[SHARE][ROWS] = {};
            if (weights.bias) {
                const T* const own = weights.bias + i64{groups.expert[place.group]} * weights.rows;
#pragma unroll
                for (int r = 0; r < ROWS; ++r) bias[r] = static_cast<float>(own[row_of(place.line, r)]);
            }
#pragma unroll 1
            for (int k0 = 0; k0 < weights.k; k0 += TILE_K) {
                asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
#pragma unroll
                for (int v = 0; v < VECS; ++v)
                    if (k0 + v * STEP_K + lane * VEC < weights.k) multiply(sums, vectors, n, v, k0 + v * STEP_K);
                copy_next<true>(row_of);
                if (++stage == STAGES) stage = 0;
            }
#pragma unroll
            for (int i = 0; i < SHARE; ++i)
                if (i < n)
#pragma unroll
                    for (int r = 0; r < ROWS; ++r) sums[i][r] = warp_reduce<Sum>(sums[i][r]);
            visit(place.group, place.line, sums, n, bias);
        }
    }

  private:
    __device__ uint4* slot(int stage, int r, int v) const { return ring + ((stage * ROWS + r) * VECS + v) * 32; }

    template <typename RowOf>
    __device__ void find_rows(RowOf row_of) {
        const T* const own = weights.w + groups.expert[ahead.group] * weights.w_expert_stride + lane * VEC;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) from[r] = own + row_of(ahead.line, r) * weights.w_row_stride;
    }
    // Copies the next tile, if there is one. A group of copies is committed in any case: their number tells which tile has
    // landed. With the last tile it signals the dependents, which then start while the tiles in flight are multiplied.
    template <bool SIGNALS, typename RowOf>
    __device__ void copy_next(RowOf row_of) {
        if (ahead.index < end) {
#pragma unroll
            for (int v = 0; v < VECS; ++v)
                if (ahead_k + v * STEP_K + lane * VEC < weights.k)
#pragma unroll
                    for (int r = 0; r < ROWS; ++r)
                        copy_async(slot(ahead_stage, r, v), from[r] + ahead_k + v * STEP_K, policy);
            ahead_k += TILE_K;
            if (ahead_k >= weights.k) {
                ahead_k = 0;
                ahead.advance(lines);
                if (ahead.index < end) find_rows(row_of);
                else if constexpr (SIGNALS) pdl_launch_dependents();
            }
            if (++ahead_stage == STAGES) ahead_stage = 0;
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
    __device__ void multiply(float (&sums)[SHARE][ROWS], const T* const (&vectors)[SHARE], int n, int v, int k) const {
        float rows[ROWS][VEC], x[VEC];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) load(rows[r], reinterpret_cast<const T*>(slot(stage, r, v)));
#pragma unroll
        for (int i = 0; i < SHARE; ++i)
            if (i < n) {
                load(x, vectors[i] + k);
#pragma unroll
                for (int r = 0; r < ROWS; ++r)
#pragma unroll
                    for (int e = 0; e < VEC; ++e) sums[i][r] = fmaf(rows[r][e], x[e], sums[i][r]);
            }
    }
};
