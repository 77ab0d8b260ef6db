// Epilogues of a matrix product: act(alpha · acc + bias) + beta · addend, in fp32, before c is stored. For sm_90a.
#pragma once
#include "store_tiles.cuh"

enum Activation { none, relu, gelu, gelu_tanh, silu };

// The approximate division and exponential are accurate enough, because the result is rounded to 16 bits.
template <Activation ACT>
__device__ __forceinline__ float activate(float x) {
    if constexpr (ACT == relu) return x < 0.0f ? 0.0f : x;  // unlike fmaxf this keeps NaN
    if constexpr (ACT == gelu) return 0.5f * x * (1.0f + erff(0.70710678f * x));
    if constexpr (ACT == gelu_tanh) return __fdividef(x, 1.0f + __expf(-1.59576912f * (x + 0.044715f * x * x * x)));
    if constexpr (ACT == silu) return __fdividef(x, 1.0f + __expf(-x));
    return x;
}

// bias [n], and addend [m, n] of any strides. VECTORS: both start at multiples of 16 bytes, and so does every row of the
// addend; with a bias n is even, with an addend a multiple of 8. The addend is not read where beta is 0.
template <typename T, Activation ACT, bool HAS_BIAS, bool HAS_ADDEND, bool HAS_ALPHA_BETA, bool VECTORS>
struct Epilogue {
    const T *bias, *addend;
    i64 addend_row_stride, addend_col_stride;
    float alpha, beta;
    int m, n;
    static constexpr bool IDENTITY = ACT == none && !HAS_BIAS && !HAS_ADDEND && !HAS_ALPHA_BETA;
    static constexpr int GROUPS_IN_FLIGHT = 8;  // groups of eight columns whose addends are loaded at once

    __device__ float scaled(float value) const { return HAS_ALPHA_BETA ? alpha * value : value; }
    __device__ void add(float& value, float added) const { value += HAS_ALPHA_BETA ? beta * added : added; }
    __device__ bool adds() const { return HAS_ADDEND && (!HAS_ALPHA_BETA || beta != 0.0f); }
    __device__ const T* addend_at(int row, int col) const {
        return addend + row * addend_row_stride + (VECTORS ? col : col * addend_col_stride);
    }
    // One element without vectors: `row` and `col` may be outside of c.
    __device__ __forceinline__ float applied(float value, int row, int col) const {
        const bool inside = row < m && col < n;
        value = activate<ACT>(scaled(value) + (HAS_BIAS && inside ? static_cast<float>(bias[col]) : 0.0f));
        if (adds() && inside) add(value, static_cast<float>(*addend_at(row, col)));
        return value;
    }

    // Accumulators in wgmma's layout: `row` is the first of this thread's two rows, col0 the tile's first column.
    // Applies to the groups of eight columns BEGIN to END, GROUPS_IN_FLIGHT at a time. Addends are loaded before the
    // activation.
    template <int BEGIN, int END, int COUNT>
    __device__ __forceinline__ void apply_rows(float (&acc)[COUNT], int row, int col0) const {
        if constexpr (IDENTITY) return;
        if constexpr (!VECTORS) {
#pragma unroll
            for (int r = 4 * BEGIN; r < 4 * END; ++r)
                acc[r] = applied(acc[r], row + r % 4 / 2 * 8, col0 + r / 4 * 8 + threadIdx.x % 4 * 2 + r % 2);
            return;
        }
        constexpr int LAST = BEGIN + GROUPS_IN_FLIGHT < END ? BEGIN + GROUPS_IN_FLIGHT : END;
        constexpr int FOURS = (LAST - BEGIN) / 4, REST = BEGIN + 4 * FOURS;
        if (col0 + 8 * BEGIN >= n) return;  // this branch also keeps the compiler from starting all loads at once
        int quad_lane = threadIdx.x % 4;
        asm volatile("" : "+r"(quad_lane));  // else the compiler keeps addresses in registers through the whole mainloop
        uint4 whole[FOURS + 1][2] = {};
        unsigned rest[4][2] = {};
        if (adds()) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const bool inside = row + 8 * h < m;
                const T* const from = addend_at(row + 8 * h, col0);
#pragma unroll
                for (int f = 0; f < FOURS; ++f) {  // as in store_row: 16 bytes a thread, 64 a quad
                    const int col = 8 * (BEGIN + 4 * f + quad_lane);
                    if (inside && col0 + col < n) whole[f][h] = *reinterpret_cast<const uint4*>(from + col);
                }
#pragma unroll
                for (int g = REST; g < LAST; ++g) {
                    const int col = 8 * g + 2 * quad_lane;
                    if (inside && col0 + col < n) rest[g - REST][h] = *reinterpret_cast<const unsigned*>(from + col);
                }
            }
        }
#pragma unroll
        for (int g = BEGIN; g < LAST; ++g) {
            float pair[2] = {};
            const int col = col0 + 8 * g + 2 * quad_lane;
            if (HAS_BIAS && col < n) load(pair, bias + col);
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[4 * g + i] = activate<ACT>(scaled(acc[4 * g + i]) + pair[i % 2]);
        }
        if (adds()) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
#pragma unroll
                for (int f = 0; f < FOURS; ++f) {
                    unsigned words[4] = {whole[f][h].x, whole[f][h].y, whole[f][h].z, whole[f][h].w};
                    transpose_quad(words);
#pragma unroll
                    for (int i = 0; i < 4; ++i) add_pair(acc, 4 * (BEGIN + 4 * f + i) + 2 * h, words[i]);
                }
#pragma unroll
                for (int g = REST; g < LAST; ++g) add_pair(acc, 4 * g + 2 * h, rest[g - REST][h]);
            }
        }
        if constexpr (LAST < END) apply_rows<LAST, END>(acc, row, col0);
    }
    template <int COUNT>
    __device__ __forceinline__ void add_pair(float (&acc)[COUNT], int at, unsigned word) const {
        Vec<T, 2> pair;
        memcpy(&pair, &word, sizeof(pair));
        add(acc[at], static_cast<float>(pair.data[0])), add(acc[at + 1], static_cast<float>(pair.data[1]));
    }

    // A transposed tile (swap-AB) as store_transposed takes it: WARPGROUP_N columns of c from col0 on where wgmma has
    // rows.
    template <int WARPGROUP_N, int COUNT>
    __device__ __forceinline__ void apply_transposed(float (&acc)[COUNT], int row0, int col0) const {
        if constexpr (IDENTITY) return;
        int thread = threadIdx.x;
        asm volatile("" : "+r"(thread));  // else the compiler keeps addresses in registers through the whole mainloop
        const int warp_col = thread / 32 % 4 * 16, line = thread % 32 / 4, quad_lane = thread % 4;
        if (warp_col >= WARPGROUP_N) return;
        if constexpr (!VECTORS) {
#pragma unroll
            for (int r = 0; r < COUNT; ++r) {
                const int col = warp_col + r % 4 / 2 * 8 + line;
                if (col < WARPGROUP_N) acc[r] = applied(acc[r], row0 + r / 4 * 8 + quad_lane * 2 + r % 2, col0 + col);
            }
            return;
        }
        float biases[2] = {};
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int col = col0 + warp_col + h * 8 + line;
            if (HAS_BIAS && col < n) biases[h] = static_cast<float>(bias[col]);
        }
#pragma unroll
        for (int r = 0; r < COUNT; ++r) acc[r] = activate<ACT>(scaled(acc[r]) + biases[r % 4 / 2]);
        if (!adds()) return;
#pragma unroll
        for (int r = 0; r < COUNT; r += 2) {
            if (r % 16 == 0) asm volatile("" ::: "memory");  // else the compiler starts all loads at once, and spills
            const int row = row0 + r / 4 * 8 + line, col = warp_col + r % 4 / 2 * 8 + quad_lane * 2;
            unsigned word = 0;
            if (col < WARPGROUP_N && col0 + col < n && row < m)
                word = *reinterpret_cast<const unsigned*>(addend_at(row, col0 + col));
            add_pair(acc, r, transpose_8x8(word));
        }
    }

    // Four columns of a row that is inside c. The columns may be outside.
    __device__ __forceinline__ void apply_four(float (&values)[4], int row, int col) const {
        if constexpr (IDENTITY) return;
        if constexpr (!VECTORS) {
#pragma unroll
            for (int i = 0; i < 4; ++i) values[i] = applied(values[i], row, col + i);
            return;
        }
        float added[4] = {};
        if (adds() && col < n) load(added, addend_at(row, col));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float one = HAS_BIAS && col + i < n ? static_cast<float>(bias[col + i]) : 0.0f;
            values[i] = activate<ACT>(scaled(values[i]) + one);
            if (adds()) add(values[i], added[i]);
        }
    }
};
