// Attention's scores in the registers of a warpgroup: what is hidden, the running softmax, weights as rows of the next product.
#pragma once
#include "tilery_tiles.cuh"

constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
// Weights are 2 ** (logit - top), where top is the largest logit that there was when top was last changed: which it is when
// another is this much larger. Weights of up to 2 ** 8 are as exact as those of up to 1, and sums need not shrink as often.
constexpr float SLACK = 8.0f;

__device__ inline float nothing() { return __int_as_float(0xff800000); }  // -inf, the logit of what is not seen

// Keys that a thread's rows do not see; `low` and `high` are the first and last that its rows see, counted from its own first.
// A scale that is not positive turns scores around.
template <int COUNT>
__device__ void hide(float (&scores)[COUNT], const int (&low)[2], const int (&high)[2], float sign) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const int column = i / 4 * 8 + i % 2, h = i / 2 % 2;
        scores[i] = column >= low[h] && column <= high[h] ? scores[i] * sign : nothing();
    }
}

__device__ inline float exp2_fast(float x) {
    float made;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(made) : "f"(x));
    return made;
}

// The running softmax of a thread's two rows, which its quad shares; each thread has a part of `total`.
struct Rows {
    float top[2] = {nothing(), nothing()}, total[2] = {0.0f, 0.0f};
    float shrink[2];  // what sums before are to be multiplied with
    bool grown;  // whether that is not 1

    // Scores become weights.
    template <int COUNT>
    __device__ void weigh(float (&scores)[COUNT], float factor) {
        grown = false;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float best = fmaxf(scores[2 * h], scores[2 * h + 1]);
#pragma unroll
            for (int i = 4; i < COUNT; i += 4) best = fmaxf(best, fmaxf(scores[i + 2 * h], scores[i + 2 * h + 1]));
            best = fmaxf(best, __shfl_xor_sync(0xffffffff, best, 1));
            best = fmaxf(best, __shfl_xor_sync(0xffffffff, best, 2)) * factor;
            const bool grows = best > top[h] + SLACK;
            shrink[h] = exp2_fast(grows ? top[h] - best : 0.0f);
            top[h] = grows ? best : top[h];
            grown |= grows;
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float less = top[h] == nothing() ? 0.0f : top[h];  // of a row that sees nothing yet
            total[h] *= shrink[h];
#pragma unroll
            for (int i = 0; i < COUNT; i += 4)
#pragma unroll
                for (int j = i + 2 * h; j < i + 2 * h + 2; ++j) {
                    scores[j] = exp2_fast(scores[j] * factor - less);
                    total[h] += scores[j];
                }
        }
    }
    // Whether any row of the warp has, or is NaN. It needs all of `total`: a wait that depends on it is not moved in front of
    // the exponentials, as the compiler does with others.
    __device__ bool any_grown() const { return __any_sync(0xffffffff, grown || !(total[0] + total[1] >= 0.0f)); }
    template <int COUNT>
    __device__ void shrink_sums(float (&sums)[COUNT]) const {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) sums[i] *= shrink[i / 2 % 2];
    }
    // Sums become averages, zeros of rows that saw nothing; total is the row's.
    template <int COUNT>
    __device__ void finish(float (&sums)[COUNT]) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            total[h] += __shfl_xor_sync(0xffffffff, total[h], 1);
            total[h] += __shfl_xor_sync(0xffffffff, total[h], 2);
            const float share = total[h] == 0.0f ? 0.0f : 1.0f / total[h];
#pragma unroll
            for (int i = 2 * h; i < COUNT; i += 4) sums[i] *= share, sums[i + 1] *= share;
        }
    }
};

template <typename T, int COUNT>
__device__ void round_to(unsigned (&words)[COUNT / 8][4], const float (&weights)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i += 2) words[i / 8][i % 8 / 2] = Pack<T, 2>::rounded({weights[i], weights[i + 1]}).bits();
}

// As sums: words are there before products begin.
template <int COUNT>
__device__ void pin(unsigned (&words)[COUNT][4]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
        asm volatile("" : "+r"(words[i][0]), "+r"(words[i][1]), "+r"(words[i][2]), "+r"(words[i][3])::"memory");
}
