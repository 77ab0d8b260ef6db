"""One block per row: its threads stride along the row, warps add by shuffles, then all scale what they read again."""

from tilery.base.spec import Artifact, TensorSpec
from tilery.languages import cupy_glue
from tilery.parts import block_rows
from tilery.parts.block_rows import Config
from tilery.parts.rows import heads_refusal, rows

archs = block_rows.archs

_SOURCE = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// V elements that one instruction moves.
template <typename T, int V>
struct alignas(V * sizeof(T)) Pack { T at[V]; };

template <typename T, int V, int THREADS>
__global__ void __launch_bounds__(THREADS) rms_norm(
    const T* x, const T* weight, T* y, long long x_stride, long long n, double eps, double offset)
{
    const long long row = blockIdx.x;  // 64 bits: row * x_stride may pass 2**31
    const auto* xs = reinterpret_cast<const Pack<T, V>*>(x + row * x_stride);
    const auto* ws = reinterpret_cast<const Pack<T, V>*>(weight);
    auto* ys = reinterpret_cast<Pack<T, V>*>(y + row * n);

    float sum = 0;
    for (long long i = threadIdx.x; i < n / V; i += THREADS) {
        const Pack<T, V> px = xs[i];
        for (int j = 0; j < V; ++j) sum += float(px.at[j]) * float(px.at[j]);
    }
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffff, sum, offset);
    __shared__ float warp_sums[THREADS / 32];
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0;
    for (int w = 0; w < THREADS / 32; ++w) sum += warp_sums[w];

    const float scale = rsqrtf(sum / n + float(eps));
    for (long long i = threadIdx.x; i < n / V; i += THREADS) {
        const Pack<T, V> px = xs[i], pw = ws[i];
        Pack<T, V> py;
        for (int j = 0; j < V; ++j) py.at[j] = T(float(px.at[j]) * scale * (float(pw.at[j]) + float(offset)));
        ys[i] = py;
    }
}
"""


def refusal(x: TensorSpec, weight: TensorSpec, config: Config | None = None) -> str | None:
    return heads_refusal(x) or block_rows.refusal(config)


def default(x: TensorSpec, weight: TensorSpec) -> Config:
    return block_rows.default(x.shape[-1])


def configs(x: TensorSpec, weight: TensorSpec) -> list[Config]:
    return block_rows.configs()


def _name(dtype, n: int, stride: int, aligned: bool, config: Config) -> str:
    """The instance of the template; 16 bytes at a time where every row starts on 16 bytes and ends on them."""
    vector = aligned and n * dtype.itemsize % 16 == 0 and stride * dtype.itemsize % 16 == 0
    width = 16 // dtype.itemsize if vector else 1
    return f"rms_norm<{cupy_glue.TYPES[dtype]}, {width}, {config.threads}>"


def compile(specs, config: Config, arch: str) -> Artifact:
    x, weight = specs
    _, n, stride = rows(x)
    return cupy_glue.legacy_compile(_SOURCE, _name(x.dtype, n, stride, x.aligned and weight.aligned, config), arch)


def run(outs, args, config: Config) -> None:
    x, weight, eps, offset = args
    m, n, stride = rows(x)
    x_ptr, w_ptr = x.data_ptr(), weight.data_ptr()
    name = _name(x.dtype, n, stride, (x_ptr | w_ptr) % 16 == 0, config)
    arguments = x_ptr, w_ptr, outs[0].data_ptr(), stride, n, float(eps), float(offset)
    cupy_glue.legacy_launch(_SOURCE, name, m, config.threads, arguments)
