// fused_moe of few tokens, in two launches: h = gated(w_gate_up x), y = add + Σ weight · (w_down h + bias). Nothing is
// sorted: every block finds which assignments share an expert, and streams its equal part of these experts' weights.
// The second launch begins to load weights before the first ends.
#include "weight_stream.cuh"

template <typename T>
struct Tokens {
    const T* x;
    T* h;  // [assignments, size]
    i64 x_stride;
    int size;
    float limit, alpha, up_offset;
};

template <typename T>
__device__ float gated(float gate, float up, const Tokens<T>& t) {
    gate = gate > t.limit ? t.limit : gate;  // fminf would drop NaN
    up = up > t.limit ? t.limit : up;
    up = up < -t.limit ? -t.limit : up;
    return gate / (1.0f + exp_for<T>(-t.alpha * gate)) * (up + t.up_offset);
}

// A line is ROWS / 2 columns of h: for each, a row of gate and one of up. Registers leave room for a block of moe_down
// on the same SM.
template <typename T, int SHARE, int ROWS, int VECS, int STAGES, int WARPS, bool EVEN_K, bool BULK, bool INTERLEAVED>
__global__ void __launch_bounds__(32 * WARPS, WARPS <= 8 && ROWS == 2 ? 2 : 1)
moe_gate_up(const __grid_constant__ Routing routing, const __grid_constant__ Weights<T> weights,
            const __grid_constant__ Tokens<T> t) {
    constexpr int COLUMNS = ROWS / 2;
    extern __shared__ __align__(16) unsigned char smem[];
    __shared__ ExpertGroups<SHARE> groups;
    pdl_wait();
    groups.find(routing);
    const int lines = t.size / COLUMNS;
    const i64 all = i64{groups.count} * lines;
    const int begin = static_cast<int>(all * blockIdx.x / gridDim.x), end = static_cast<int>(all * (blockIdx.x + 1) / gridDim.x);
    const auto row_of = [&](int line, int r) {
        const int column = line * COLUMNS + r / 2;
        return INTERLEAVED ? column * 2 + r % 2 : column + r % 2 * t.size;
    };
    using Stream = WeightStream<T, SHARE, ROWS, VECS, STAGES, WARPS, EVEN_K, BULK, decltype(row_of)>;
    Stream stream(smem, weights, groups, row_of, lines, begin, end);
    stream.template fill<true>();
    stream.run(
        [&](int a) { return t.x + a / routing.topk * t.x_stride; },
        [&](int group, int line, const float (&sums)[SHARE][ROWS], int n, const float (&bias)[ROWS]) {
            const int lane = threadIdx.x % 32;
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) {
                float gate = 0.0f, up = 0.0f;
#pragma unroll
                for (int i = 0; i < SHARE; ++i)
                    if (lane == i) gate = sums[i][2 * c], up = sums[i][2 * c + 1];
                if (lane < n)
                    t.h[i64{groups.members[group][lane]} * t.size + line * COLUMNS + c] =
                        static_cast<T>(gated(gate + bias[2 * c], up + bias[2 * c + 1], t));
            }
        });
}

template <typename T>
struct Combined {
    const float* choice_weights;  // [assignments]
    const T* h;  // [assignments, k]
    const T* add;  // or null
    T* y;
    i64 add_stride;
    int tokens;
    int max_rows;  // of a block
};

// A block has some rows of all experts, which are columns of y: it sums over a token's experts itself.
template <typename T, int SHARE, int ROWS, int VECS, int STAGES, int WARPS, bool EVEN_K, bool BULK>
__global__ void __launch_bounds__(32 * WARPS, WARPS <= 8 && ROWS == 2 ? 2 : 1)
moe_down(const __grid_constant__ Routing routing, const __grid_constant__ Weights<T> weights,
         const __grid_constant__ Combined<T> c) {
    extern __shared__ __align__(16) unsigned char smem[];
    __shared__ ExpertGroups<SHARE> groups;
    __shared__ float choice_weights[MAX_ASSIGNMENTS];
    if (threadIdx.x < routing.assignments) choice_weights[threadIdx.x] = load_settled(c.choice_weights + threadIdx.x);
    groups.find(routing);
    const int all = weights.rows / ROWS;
    const int first = static_cast<int>(i64{all} * blockIdx.x / gridDim.x);
    const int lines = static_cast<int>(i64{all} * (blockIdx.x + 1) / gridDim.x) - first;
    const auto row_of = [&](int line, int r) { return (first + line) * ROWS + r; };
    using Stream = WeightStream<T, SHARE, ROWS, VECS, STAGES, WARPS, EVEN_K, BULK, decltype(row_of)>;
    float* const parts = reinterpret_cast<float*>(smem + Stream::BYTES);  // [assignments, max_rows]
    Stream stream(smem, weights, groups, row_of, lines, 0, groups.count * lines);
    stream.template fill<false>();  // weights, which moe_gate_up does not write
    pdl_wait();
    stream.run(
        [&](int a) { return c.h + i64{a} * weights.k; },
        [&](int group, int line, const float (&sums)[SHARE][ROWS], int n, const float (&bias)[ROWS]) {
#pragma unroll
            for (int i = 0; i < SHARE; ++i)
                if (i < n && threadIdx.x % 32 == 0)
#pragma unroll
                    for (int r = 0; r < ROWS; ++r)
                        parts[groups.members[group][i] * c.max_rows + line * ROWS + r] = sums[i][r] + bias[r];
        });
    __syncthreads();
    const int rows = lines * ROWS;
    for (int i = threadIdx.x; i < c.tokens * rows; i += 32 * WARPS) {
        const int token = i / rows, row = i % rows, column = first * ROWS + row;
        float total = c.add ? static_cast<float>(c.add[token * c.add_stride + column]) : 0.0f;
        for (int j = 0; j < routing.topk; ++j) {
            const int a = token * routing.topk + j;
            if (groups.expert_of[a] >= 0) total += parts[a * c.max_rows + row] * choice_weights[a];
        }
        c.y[i64{token} * weights.rows + column] = static_cast<T>(total);
    }
}
