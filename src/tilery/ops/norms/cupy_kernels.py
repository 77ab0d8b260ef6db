"""rms_norm in CuPy: a block takes a row.

Its threads stride along the row, warps add by shuffles, and all threads scale what they read again.
"""

from tilery.base.launch import Launch
from tilery.base.rows import rows
from tilery.core.call import Call
from tilery.languages.cupy_glue import TYPES, Template
from tilery.ops.rows.thread_blocks import BlockRows, Blocks

_SOURCE = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// VEC elements that one instruction moves.
template <typename T, int VEC>
struct alignas(VEC * sizeof(T)) Vec { T data[VEC]; };

template <typename T, int VEC, int THREADS>
__global__ void __launch_bounds__(THREADS) rms_norm(
    const T* x, const T* weight, T* y, long long x_stride, long long n, double eps, double offset)
{
    const long long row = blockIdx.x;  // 64 bits: row * x_stride may pass 2**31
    const auto* xs = reinterpret_cast<const Vec<T, VEC>*>(x + row * x_stride);
    const auto* ws = reinterpret_cast<const Vec<T, VEC>*>(weight);
    auto* ys = reinterpret_cast<Vec<T, VEC>*>(y + row * n);

    float sum = 0;
    for (long long i = threadIdx.x; i < n / VEC; i += THREADS) {
        const Vec<T, VEC> vx = xs[i];
        for (int j = 0; j < VEC; ++j) sum += float(vx.data[j]) * float(vx.data[j]);
    }
    for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffff, sum, mask);
    __shared__ float warp_sums[THREADS / 32];
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0;
    for (int w = 0; w < THREADS / 32; ++w) sum += warp_sums[w];

    const float rstd = rsqrtf(sum / n + float(eps));
    for (long long i = threadIdx.x; i < n / VEC; i += THREADS) {
        const Vec<T, VEC> vx = xs[i], vw = ws[i];
        Vec<T, VEC> vy;
        for (int j = 0; j < VEC; ++j) vy.data[j] = T(float(vx.data[j]) * rstd * (float(vw.data[j]) + float(offset)));
        ys[i] = vy;
    }
}
"""


class RmsNorm(BlockRows):
    def launches(self, call: Call, config: Blocks) -> list[Launch]:
        x, weight = call.x, call.weight
        m, n, stride = rows(x)
        values = 16 // x.dtype.itemsize
        # 16 bytes at a time where every row starts on 16 bytes and ends on them.
        vector = x.aligned and weight.aligned and n % values == 0 and stride % values == 0
        constants = {"T": TYPES[x.dtype], "VEC": values if vector else 1, "THREADS": config.threads}
        args = {"x": x, "weight": weight, "y": call.y, "x_stride": stride, "n": n}
        args |= {"eps": call.eps, "offset": call.offset}
        return [Launch(Template(_SOURCE, "rms_norm"), m, args, constants, {"threads": config.threads})]


rms_norm = RmsNorm()
