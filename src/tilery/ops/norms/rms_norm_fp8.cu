// A row waits in the registers of a block or a cluster for its mean square and its greatest value, which are exchanged at
// once: y = x · rstd · (w + offset), so that the greatest of x · (w + offset) is y's but for rstd.
#include <cuda_fp8.h>

#include "tilery_rows.cuh"

// Orders magnitudes by their bits, so that NaN is on top.
struct Greatest {
    static constexpr float start = 0.0f;
    static __device__ float join(float a, float b) { return __int_as_float(max(__float_as_int(a), __float_as_int(b))); }
};

// As parts/fp8.py defines it.
template <bool E5M2>
__device__ float scale_of(float top, bool pow2) {
    const float made = Greatest::join(top, 1e-12f) / (E5M2 ? 57344.0f : 448.0f);
    const int bits = __float_as_int(made);
    return pow2 && !isnan(made) ? __int_as_float((bits + 0x7fffff) & 0x7f800000) : made;
}

// The row's 1 / sqrt(mean + eps), and the greatest magnitude in it.
template <int THREADS, int BLOCKS>
__device__ float2 row_sums(float squares, float top, i64 n, float eps) {
    float4 all[BLOCKS];
    Cluster<BLOCKS>::exchange(all, {reduce_block<Sum, THREADS>(squares), reduce_block<Greatest, THREADS>(top)}, 0);
    float sum = 0.0f, most = 0.0f;
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) sum += all[b].x, most = Greatest::join(most, all[b].y);
    return {rsqrtf(sum / n + eps), most};
}

// GROUPED: a scale for every 128 values, which are those of neighbouring lanes; else one for the row.
template <typename T, bool ADD, bool GROUPED, bool E5M2, int VEC, int STEPS, int THREADS, int BLOCKS>
__global__ void __launch_bounds__(THREADS) rms_norm_fp8(
    const T* x, const T* r, const T* w, unsigned char* y, float* scales, T* total, i64 x_stride, i64 r_stride, i64 s_row,
    i64 s_step, i64 n, float eps, float offset, int pow2) {
    using Row = Row<T, VEC, STEPS, THREADS, BLOCKS>;
    constexpr int LANES = 128 / VEC;
    Row::cluster::begin();
    const i64 index = Row::index();
    Row row, other;
    row.load(x + index * x_stride, n);
    if constexpr (ADD) other.load(r + index * r_stride, n);
    Row weights;
    weights.load(w, n);  // under way before the sums wait for the row
    float squares = 0.0f, top = 0.0f;
    Row::each(n, [&](int step, int col) {
        if constexpr (ADD) row.packs[step] = add(row.packs[step], other.packs[step], total + index * n + col);
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
            const float value = static_cast<float>(row.packs[step].at[i]);
            squares += value * value;
            top = Greatest::join(top, fabsf(value * (static_cast<float>(weights.packs[step].at[i]) + offset)));
        }
    });
    const float2 sums = row_sums<THREADS, BLOCKS>(squares, top, n, eps);
    float made = scale_of<E5M2>(n == 0 ? 0.0f : fabsf(sums.y * sums.x), pow2);  // a row of nothing has a scale too
    if (!GROUPED && threadIdx.x == 0 && Row::cluster::rank() == 0) scales[index * s_row] = made;
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        const int col = Row::column(s);
        float values[VEC], most = 0.0f;
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
            const float weight = static_cast<float>(weights.packs[s].at[i]) + offset;
            values[i] = col < n ? static_cast<float>(row.packs[s].at[i]) * sums.x * weight : 0.0f;
            most = Greatest::join(most, fabsf(values[i]));
        }
        if constexpr (GROUPED) {  // all lanes, those past the row too
#pragma unroll
            for (int mask = LANES / 2; mask > 0; mask /= 2) most = Greatest::join(most, __shfl_xor_sync(~0u, most, mask));
            made = scale_of<E5M2>(most, pow2);
            if (col < n && threadIdx.x % LANES == 0) scales[index * s_row + col / 128 * s_step] = made;
        }
        if (col < n) {
            Pack<unsigned char, VEC> bytes;
#pragma unroll
            for (int i = 0; i < VEC; ++i)
                bytes.at[i] = __nv_cvt_float_to_fp8(values[i] * (1.0f / made), __NV_SATFINITE, E5M2 ? __NV_E5M2 : __NV_E4M3);
            bytes.to_global(y + index * n + col);
        }
    }
}
