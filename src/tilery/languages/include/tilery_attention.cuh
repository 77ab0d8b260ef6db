// Attention in the registers of warpgroups: scores, what is hidden of them, the running softmax, weights as rows of the next
// product, and the walk over blocks of keys and values that a ring brings.
#pragma once
#include "tilery_tiles.cuh"

constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

__device__ inline float nothing() { return __int_as_float(0xff800000); }  // -inf, the logit of what is not seen
__device__ inline float not_a_number() { return __int_as_float(0x7fffffff); }  // of rows whose indices are wrong

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

// The running softmax of a thread's two rows, which its quad shares; each thread has a part of `total`. Weights are
// 2 ** (logit - top), top the largest logit so far: its weight is 1, which is not rounded. Were top left behind until a weight
// is 2 ** 8, sums would shrink less often, and errors be up to twice as large: docs/perf/attention.md.
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
            const bool grows = best > top[h];
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
    // From here on total is the row's.
    __device__ void add_totals() {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            total[h] += __shfl_xor_sync(0xffffffff, total[h], 1);
            total[h] += __shfl_xor_sync(0xffffffff, total[h], 2);
        }
    }
    // Sums become averages, zeros of rows that saw nothing.
    template <int COUNT>
    __device__ void finish(float (&sums)[COUNT]) {
        add_totals();
#pragma unroll
        for (int h = 0; h < 2; ++h) {
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

template <typename T> struct Format;
template <> struct Format<__half> { using type = f16; };
template <> struct Format<__nv_bfloat16> { using type = bf16; };

struct Bounds { int begin, end; };

// Inside of what is there whatever the numbers say, and every token is some sequence's: the first one begins with token 0, and
// one sequence more than there are has the tokens that are left.
__device__ inline Bounds bounds_of(const int* ends, int sequence, int sequences, int tokens) {
    const int begin = sequence == 0 ? 0 : min(max(ends[sequence], 0), tokens);
    return {begin, sequence < sequences ? min(max(ends[sequence + 1], begin), tokens) : tokens};
}

// Whether those bounds are not what the numbers say, or more tokens than the `most` that were declared. Rows of such a sequence
// are NaN.
__device__ inline bool is_cut(const int* ends, int sequence, int tokens, int most) {
    const int begin = ends[sequence], end = ends[sequence + 1];
    return begin < 0 || (sequence == 0 && begin > 0) || end < begin || end > tokens || end - begin > most;
}

// Blocks of BN keys that any query from place `first` to `last` sees; all of them see all of the `plain` ones. A query sees
// keys so far to the left and right of its place.
struct Seen {
    Bounds blocks, plain;

    template <int BN>
    static __device__ Seen of(int first, int last, int keys, int left, int right) {
        const int begin = max(first - left, 0), end = min(last + right + 1, keys);
        if (begin >= end) return {{0, 0}, {0, 0}};
        return {{begin / BN, (end + BN - 1) / BN},
                {(max(last - left, 0) + BN - 1) / BN, max(min(first + right + 1, keys), 0) / BN}};
    }
};

// Rows from `first` on of a tile of ROWS are not this sequence's. Their weights are 0, but 0 times NaN is NaN.
template <int ROWS, int CHUNKS>
__device__ void clear_rows(unsigned char* tile, int first, int warpgroup) {
    for (int i = first * 8 + threadIdx.x % 128; i < ROWS * 8; i += 128)
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) *reinterpret_cast<uint4*>(tile + c * ROWS * SPAN + i * 16) = uint4{0, 0, 0, 0};
    tile_written();
    warpgroup_meet(warpgroup);
}

// Whose turn it is to hand products to the tensor cores: each of COUNT warpgroups lets the next go. The last one lets the
// first go before it begins, and the first takes that turn when all is done.
template <int COUNT>
struct Turn {
    static __device__ void sync(int warpgroup) { asm volatile("bar.sync %0, 256;" ::"r"(1 + COUNT + warpgroup) : "memory"); }
    static __device__ void pass(int warpgroup) {
        asm volatile("bar.arrive %0, 256;" ::"r"(1 + COUNT + (warpgroup + 1 == COUNT ? 0 : warpgroup + 1)) : "memory");
    }
    static __device__ void begin(int warpgroup) {
        if (warpgroup == COUNT - 1) pass(warpgroup);
    }
    static __device__ void end(int warpgroup) {
        if (warpgroup == 0) sync(warpgroup);
    }
};

template <>
struct Turn<1> {  // it is always its own
    static __device__ void sync(int) {}
    static __device__ void pass(int) {}
    static __device__ void begin(int) {}
    static __device__ void end(int) {}
};

// What a walk must know of its tile: places of a thread's two rows, and the keys there are. `clear`: there may be others behind.
struct Sight {
    Seen seen;
    int places[2], keys, left, right;
    bool clear;
};

// Tiles of WARPGROUPS · 64 queries of heads of D, and blocks of BN keys or values.
template <typename T, int D, int BN, int WARPGROUPS>
struct Walk {
    using In = typename Format<T>::type;
    static constexpr int CHUNKS = (D * sizeof(T) + SPAN - 1) / SPAN, WIDE = CHUNKS * SPAN / sizeof(T);  // past D are zeros
    static constexpr int COLUMNS = SPAN / sizeof(T);  // of a chunk
    static constexpr int BM = WARPGROUPS * 64, BYTES = BN * CHUNKS * SPAN, Q_BYTES = BM * CHUNKS * SPAN;

    // From the last block to the first: its keys come, then the values of the one before, and at the end its own. Queries have
    // come when it begins, and are let go; `rows` and `sums` are of the warpgroup's 64.
    template <typename Ring, typename Queries>
    static __device__ __forceinline__ void run(Ring& ring, Queries& q, const Sight& sight, float scale, Rows& rows,
                                               float (&sums)[WIDE / 2]) {
        const float factor = scale == 0.0f ? 1e-30f : fabsf(scale) * LOG2E, sign = scale < 0.0f ? -1.0f : 1.0f;
        const int warpgroup = WARPGROUPS == 1 ? 0 : __shfl_sync(0xffffffff, threadIdx.x / 128, 0), quad = threadIdx.x % 4;
        const Bounds blocks = sight.seen.blocks, plain = sight.seen.plain;
        float scores[BN / 2];
        unsigned weights[BN / 16][4];
#pragma unroll
        for (int i = 0; i < WIDE / 2; ++i) sums[i] = 0.0f;
        if (blocks.begin == blocks.end) {
            q.release(), q.next();
            return;
        }
        const auto multiply_keys = [&](const Ring& at) {
            product_begin(scores);
#pragma unroll
            for (int s = 0; s < D / 16; ++s)
                Product<In, In, BN>::add(
                    scores, tile_descriptor(q.tile() + (s / 4 * BM + warpgroup * 64) * SPAN) + s % 4 * 2,
                    tile_descriptor(at.tile() + s / 4 * BN * SPAN) + s % 4 * 2, s > 0);
            product_commit();
        };
        const auto multiply_values = [&](const Ring& at, int block) {
            if (sight.clear && (block + 1) * BN > sight.keys)
                clear_rows<BN, CHUNKS>(at.tile(), sight.keys - block * BN, warpgroup);
            pin(weights);
            product_begin(sums);
            const u64 values = held_descriptor(at.tile(), BN * SPAN);
#pragma unroll
            for (int s = 0; s < BN / 16; ++s) HeldProduct<In, WIDE>::add(sums, weights[s], values + s * 128);
            product_commit();
        };
        const auto weigh = [&](int block) {
            if (block == blocks.begin) q.release(), q.next();  // its scores are the last
            if (block < plain.begin || block >= plain.end || !(scale > 0.0f)) {
                const int mine = block * BN + 2 * quad, end = sight.keys - 1 - mine;
                const int places[2] = {sight.places[0] - mine, sight.places[1] - mine};
                const int low[2] = {places[0] - sight.left, places[1] - sight.left};
                const int high[2] = {min(places[0] + sight.right, end), min(places[1] + sight.right, end)};
                hide(scores, low, high, sign);
            }
            rows.weigh(scores, factor);
        };
        ring.wait();
        multiply_keys(ring);
        product_end(scores);
        ring.release(), ring.next();
        weigh(blocks.end - 1);
        round_to<T>(weights, scores);
        for (int b = blocks.end - 2; b >= blocks.begin; --b) {
            Ring k = ring, v = ring;
            v.next();
            Turn<WARPGROUPS>::sync(warpgroup);
            k.wait(), multiply_keys(k);
            v.wait(), multiply_values(v, b + 1);
            Turn<WARPGROUPS>::pass(warpgroup);
            product_wait<1>(), pin(scores), k.release();
            weigh(b);
            if (rows.any_grown()) {
                product_end(sums), rows.shrink_sums(sums);
            } else {
                product_end(sums);
            }
            v.release();
            pin(weights);  // they were read until now
            round_to<T>(weights, scores);
            ring = v, ring.next();
        }
        ring.wait(), multiply_values(ring, blocks.begin);
        product_end(sums);
        ring.release(), ring.next();
    }
};
