// What becomes of sums before they are stored: act(alpha · sum + bias) + beta · addend, in fp32. For sm_90a.
#pragma once
#include "tilery_tiles.cuh"

enum Activation { none, relu, gelu, gelu_tanh, silu };

// Of values that will be rounded to 16 bits.
template <Activation ACT>
__device__ __forceinline__ float activated(float x) {
    if constexpr (ACT == relu) return x < 0.0f ? 0.0f : x;  // written so that NaN stays
    if constexpr (ACT == gelu) return 0.5f * x * (1.0f + erff(0.70710678f * x));
    if constexpr (ACT == gelu_tanh) return __fdividef(x, 1.0f + __expf(-1.59576912f * (x + 0.044715f * x * x * x)));
    if constexpr (ACT == silu) return __fdividef(x, 1.0f + __expf(-x));
    return x;
}

// Sums are stored as they are.
struct Plain {
    template <int BEGIN, int END, int COUNT>
    __device__ void rows(float (&)[COUNT], int, int) const {}
    template <int WIDTH, int COUNT>
    __device__ void columns(float (&)[COUNT], int, int) const {}
    __device__ void four(float (&)[4], int, int) const {}
};

// bias [n] and addend [m, n], whose rows are `stride` apart. Both start at multiples of 16 bytes, as the addend's rows do; a
// bias has an even number of columns, an addend a multiple of 8. Where beta is 0 it is not read.
template <typename T, Activation ACT, bool BIAS, bool ADD, bool SCALED>
struct Ending {
    const T *bias, *addend;
    i64 stride;
    float alpha, beta;
    int m, n;
    static constexpr int EIGHTS = 8;  // of columns, whose addends are under way at once

    __device__ float scaled(float sum) const { return SCALED ? alpha * sum : sum; }
    __device__ void add(float& sum, float value) const { sum += SCALED ? beta * value : value; }
    __device__ bool adds() const { return ADD && (!SCALED || beta != 0.0f); }
    __device__ const T* addend_at(int row, int col) const { return addend + row * stride + col; }

    // Of a thread of a warp whose sums lie as wgmma has them, `left` on the left, `row` the first of its two: the eights of
    // columns from BEGIN to END, some at a time. Their addends are asked for before they are activated.
    template <int BEGIN, int END, int COUNT>
    __device__ __forceinline__ void rows(float (&sums)[COUNT], int row, int left) const {
        constexpr int LAST = BEGIN + EIGHTS < END ? BEGIN + EIGHTS : END, FOURS = (LAST - BEGIN) / 4, REST = BEGIN + 4 * FOURS;
        if (left + 8 * BEGIN >= n) return;  // a branch also keeps the compiler from starting all of them at once
        int quad = threadIdx.x % 4;
        asm volatile("" : "+r"(quad));  // or addresses would be kept in registers through all products
        uint4 whole[FOURS + 1][2] = {};
        unsigned rest[4][2] = {};
        if (adds()) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const bool inside = row + 8 * h < m;
                const T* const from = addend_at(row + 8 * h, left);
#pragma unroll
                for (int f = 0; f < FOURS; ++f) {  // as store_row stores: 16 bytes a thread, 64 a quad
                    const int col = 8 * (BEGIN + 4 * f + quad);
                    if (inside && left + col < n) whole[f][h] = *reinterpret_cast<const uint4*>(from + col);
                }
#pragma unroll
                for (int g = REST; g < LAST; ++g) {
                    const int col = 8 * g + 2 * quad;
                    if (inside && left + col < n) rest[g - REST][h] = *reinterpret_cast<const unsigned*>(from + col);
                }
            }
        }
#pragma unroll
        for (int g = BEGIN; g < LAST; ++g) {
            float pair[2] = {};
            const int col = left + 8 * g + 2 * quad;
            if (BIAS && col < n) load(pair, bias + col);
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[4 * g + i] = activated<ACT>(scaled(sums[4 * g + i]) + pair[i % 2]);
        }
        if (adds()) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
#pragma unroll
                for (int f = 0; f < FOURS; ++f) {
                    unsigned words[4] = {whole[f][h].x, whole[f][h].y, whole[f][h].z, whole[f][h].w};
                    transpose_quad(words);
#pragma unroll
                    for (int i = 0; i < 4; ++i) add_pair(sums, 4 * (BEGIN + 4 * f + i) + 2 * h, words[i]);
                }
#pragma unroll
                for (int g = REST; g < LAST; ++g) add_pair(sums, 4 * g + 2 * h, rest[g - REST][h]);
            }
        }
        if constexpr (LAST < END) rows<LAST, END>(sums, row, left);
    }
    template <int COUNT>
    __device__ __forceinline__ void add_pair(float (&sums)[COUNT], int at, unsigned word) const {
        Pack<T, 2> pair;
        memcpy(&pair, &word, sizeof(pair));
        add(sums[at], static_cast<float>(pair.at[0])), add(sums[at + 1], static_cast<float>(pair.at[1]));
    }

    // Of a warp that has WIDTH columns where wgmma has rows, from `left` on, and tokens where it has columns, as store_columns
    // takes them.
    template <int WIDTH, int COUNT>
    __device__ __forceinline__ void columns(float (&sums)[COUNT], int first, int left) const {
        const int skip = threadIdx.x / 32 % 4 * 16, line = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
        if (skip >= WIDTH) return;
        float two[2] = {};
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int col = left + skip + h * 8 + line;
            if (BIAS && col < n) two[h] = static_cast<float>(bias[col]);
        }
#pragma unroll
        for (int r = 0; r < COUNT; ++r) sums[r] = activated<ACT>(scaled(sums[r]) + two[r % 4 / 2]);
        if (!adds()) return;
#pragma unroll
        for (int r = 0; r < COUNT; r += 2) {
            const int token = first + r / 4 * 8 + line, own = skip + r % 4 / 2 * 8 + quad * 2;
            unsigned word = 0;
            if (own < WIDTH && left + own < n && token < m)
                word = *reinterpret_cast<const unsigned*>(addend_at(token, left + own));
            add_pair(sums, r, transposed(word));
        }
    }

    // Four columns of a row that c has; of the columns only the first need be there.
    __device__ __forceinline__ void four(float (&sums)[4], int row, int col) const {
        float added[4] = {};
        if (adds() && col < n) load(added, addend_at(row, col));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float one = BIAS && col + i < n ? static_cast<float>(bias[col + i]) : 0.0f;
            sums[i] = activated<ACT>(scaled(sums[i]) + one);
            if (adds()) add(sums[i], added[i]);
        }
    }
};
