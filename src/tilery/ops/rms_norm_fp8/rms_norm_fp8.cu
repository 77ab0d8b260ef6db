// RMS norm to fp8, with an optional residual addition: y = x · rstd · (weight + offset), quantised with one scale for
// each row or for each group of 128 values.
//
// A row stays in the registers of a block or of a cluster of blocks until its mean square and its absolute maximum are
// known. One exchange in the cluster brings both: the absolute maximum of y is that of x · (weight + offset), times
// rstd.
#include <cuda_fp8.h>

#include "rows.cuh"

// Maximum of magnitudes by their bits, so that NaN is the largest.
struct AbsMax {
    static constexpr float identity = 0.0f;
    static __device__ float combine(float a, float b) {
        return __int_as_float(max(__float_as_int(a), __float_as_int(b)));
    }
};

// The quantisation scale for values up to abs_max, as all fp8 ops define it; with pow2 rounded up to a power of two.
template <bool E5M2>
__device__ float scale_of(float abs_max, bool pow2) {
    const float scale = AbsMax::combine(abs_max, 1e-12f) / (E5M2 ? 57344.0f : 448.0f);
    const int bits = __float_as_int(scale);
    return pow2 && !isnan(scale) ? __int_as_float((bits + 0x7fffff) & 0x7f800000) : scale;
}

struct RowStats { float rstd, abs_max; };

// Statistics of the row, from each thread's sum of squares and absolute maximum.
template <int THREADS, int CLUSTER>
__device__ RowStats row_stats(float squares, float abs_max, i64 n, float eps) {
    float4 all[CLUSTER];
    Cluster<CLUSTER>::all_gather(all, {block_reduce<Sum, THREADS>(squares), block_reduce<AbsMax, THREADS>(abs_max)}, 0);
    float sum = 0.0f, most = 0.0f;
#pragma unroll
    for (int b = 0; b < CLUSTER; ++b) sum += all[b].x, most = AbsMax::combine(most, all[b].y);
    return {rsqrtf(sum / n + eps), most};
}

// ADD: total = x + residual takes the place of x, and is stored too. GROUPED: a scale for each group of 128 values,
// which neighbouring lanes have; else one for the row. The parameters are not in a struct: that would change the
// register allocation (NVRTC 13.4: up to 2 registers more).
template <typename T, bool ADD, bool GROUPED, bool E5M2, int VEC, int VECS_PER_THREAD, int THREADS, int CLUSTER>
__global__ void __launch_bounds__(THREADS) rms_norm_fp8(
    const T* x, const T* residual, const T* weight, unsigned char* y, float* scales, T* total, i64 x_stride,
    i64 residual_stride, i64 scales_row_stride, i64 scales_group_stride, i64 n, float eps, float offset, int pow2) {
    using Row = RegisterRow<T, VEC, VECS_PER_THREAD, THREADS, CLUSTER>;
    constexpr int LANES = 128 / VEC;  // of a group
    Row::cluster::begin();
    const i64 index = Row::index();
    Row row, other;
    row.load(x + index * x_stride, n);
    if constexpr (ADD) other.load(residual + index * residual_stride, n);
    Row weights;
    weights.load(weight, n);  // in flight before the sums wait for the row
    float squares = 0.0f, abs_max = 0.0f;
    Row::for_each(n, [&](int v, int col) {
        if constexpr (ADD) row.vecs[v] = add_and_store(row.vecs[v], other.vecs[v], total + index * n + col);
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
            const float value = static_cast<float>(row.vecs[v].data[i]);
            squares += value * value;
            abs_max = AbsMax::combine(abs_max, fabsf(value * (static_cast<float>(weights.vecs[v].data[i]) + offset)));
        }
    });
    const RowStats stats = row_stats<THREADS, CLUSTER>(squares, abs_max, n, eps);
    float scale = scale_of<E5M2>(n == 0 ? 0.0f : fabsf(stats.abs_max * stats.rstd), pow2);  // empty rows have one too
    if (!GROUPED && threadIdx.x == 0 && Row::cluster::rank() == 0) scales[index * scales_row_stride] = scale;
#pragma unroll
    for (int v = 0; v < VECS_PER_THREAD; ++v) {
        const int col = Row::column(v);
        float values[VEC], group_max = 0.0f;
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
            const float w = static_cast<float>(weights.vecs[v].data[i]) + offset;
            values[i] = col < n ? static_cast<float>(row.vecs[v].data[i]) * stats.rstd * w : 0.0f;
            group_max = AbsMax::combine(group_max, fabsf(values[i]));
        }
        if constexpr (GROUPED) {  // all lanes take part in the shuffles, those beyond the row too
#pragma unroll
            for (int mask = LANES / 2; mask > 0; mask /= 2)
                group_max = AbsMax::combine(group_max, __shfl_xor_sync(~0u, group_max, mask));
            scale = scale_of<E5M2>(group_max, pow2);
            if (col < n && threadIdx.x % LANES == 0)
                scales[index * scales_row_stride + col / 128 * scales_group_stride] = scale;
        }
        if (col < n) {
            constexpr auto FORMAT = E5M2 ? __NV_E5M2 : __NV_E4M3;
            Vec<unsigned char, VEC> bytes;
#pragma unroll
            for (int i = 0; i < VEC; ++i)
                bytes.data[i] = __nv_cvt_float_to_fp8(values[i] * (1.0f / scale), __NV_SATFINITE, FORMAT);
            bytes.store_global(y + index * n + col);
        }
    }
}
