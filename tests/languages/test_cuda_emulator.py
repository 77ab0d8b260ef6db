"""The emulator of CUDA C++: small kernels are right, and each mistake planted in one is noticed."""

import ctypes

import pytest
import torch
from emulated import WITHOUT_A_GPU, wrong

from tilery.base.errors import CompileFailed
from tilery.base.launch import Persistent
from tilery.languages.cuda_emulator import build
from tilery.languages.cuda_emulator.translate import translated

pytestmark = WITHOUT_A_GPU


# Threads, shared memory, barriers

REVERSE = """
#include "common.cuh"
__global__ void x(const float* a, float* out) {
    __shared__ float held[128];
    extern __shared__ float more[];
    held[threadIdx.x] = a[blockIdx.x * 128 + threadIdx.x];
    more[127 - threadIdx.x] = held[threadIdx.x];
    __syncthreads();
    out[blockIdx.x * 128 + threadIdx.x] = held[127 - threadIdx.x] + more[threadIdx.x];
}
"""


def test_threads_share_memory(kernel):
    a, out = torch.randn(5, 128), torch.empty(5, 128)
    kernel(REVERSE)(grid=5, shared=512, a=a, out=out)
    assert torch.equal(out, 2 * a.flip(1))


def test_a_missing_syncthreads_is_noticed(kernel):
    a, out = torch.randn(5, 128), torch.empty(5, 128)
    broken = kernel(REVERSE, ("    __syncthreads();\n", ""))
    assert wrong(lambda: broken(grid=5, shared=512, a=a, out=out), lambda: torch.equal(out, 2 * a.flip(1)))


def test_a_write_behind_shared_memory_is_noticed(kernel):
    a, out = torch.randn(1, 128), torch.empty(1, 128)
    with pytest.raises(RuntimeError, match="the block wrote to byte 508 of its 508 bytes of dynamic shared memory"):
        kernel(REVERSE, ("more[127 - threadIdx.x]", "more[128 - threadIdx.x]"))(shared=508, a=a, out=out)


def test_a_barrier_that_some_threads_never_reach_is_a_deadlock_that_says_where(kernel):
    text = '__global__ void x(int* out) { if (threadIdx.x < 32) asm volatile("bar.sync 3, 64;"); }'
    with pytest.raises(RuntimeError) as caught:
        kernel(text)(out=torch.zeros(1, dtype=torch.int32))
    said = str(caught.value)
    assert "emulating x with 1 blocks of 128 threads: no thread can go on. Waiting:" in said
    assert "block 0, warp 0 at bar.sync" in said and said.endswith(": 32 threads") and "warp 1" not in said


def test_a_barrier_of_two_minds_is_noticed(kernel):
    text = """__global__ void x(int* out) {
        if (threadIdx.x < 32) asm volatile("bar.sync 3, 128;"); else asm volatile("bar.sync 3, 96;");
    }"""
    with pytest.raises(RuntimeError, match=r"named barrier 3 was begun by others for (96|128) threads, here for"):
        kernel(text)(out=torch.zeros(1, dtype=torch.int32))


SUM = """
#include "common.cuh"
__global__ void x(const float* a, float* out) {
    const float sum = block_reduce<Sum, 128>(a[blockIdx.x * 128 + threadIdx.x]);
    const unsigned even = __ballot_sync(0xffffffff, threadIdx.x % 2 == 0);
    if (threadIdx.x == 0) out[blockIdx.x] = even == 0x55555555 ? sum : -1.0f;
}
"""


def test_lanes_of_a_warp_exchange_values(kernel):
    a, out = torch.randint(-9, 9, (3, 128)).float(), torch.empty(3)
    kernel(SUM)(grid=3, a=a, out=out)
    assert torch.equal(out, a.sum(1))


NEIGHBOUR = """
#include "cluster.cuh"
__global__ void x(const float* a, float* out) {
    __shared__ float4 place;
    Cluster<4>::begin();
    const int rank = Cluster<4>::rank();
    Cluster<4>::wait_started();
    if (threadIdx.x == 0) Cluster<4>::store_remote(&place, (rank + 1) % 4, make_float4(a[blockIdx.x], 0, 0, 0));
    Cluster<4>::sync();
    if (threadIdx.x == 0) out[blockIdx.x] = place.x;
}
"""


def test_blocks_of_a_cluster_write_to_each_other(kernel):
    a, out = torch.randn(8), torch.empty(8)
    kernel(NEIGHBOUR)(grid=8, cluster=4, a=a, out=out)
    assert torch.equal(out, a.view(2, 4).roll(1, 1).flatten())


def test_a_missing_barrier_of_a_cluster_is_noticed(kernel):
    a, out = torch.randn(8), torch.empty(8)
    broken = kernel(NEIGHBOUR, ("    Cluster<4>::sync();\n", ""))
    right = a.view(2, 4).roll(1, 1).flatten()
    assert wrong(lambda: broken(grid=8, cluster=4, a=a, out=out), lambda: torch.equal(out, right))


# The launch


def test_after_an_error_the_next_launch_is_as_if_nothing_had_been(kernel):
    a, out = torch.randn(5, 128), torch.empty(5, 128)
    good = kernel(REVERSE)
    stuck = kernel('__global__ void x(int* out) { if (threadIdx.x < 32) asm volatile("bar.sync 3, 64;"); }')
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no thread can go on"):
            stuck(grid=7, out=torch.zeros(1, dtype=torch.int32))
        good(grid=5, shared=512, a=a, out=out)
        assert torch.equal(out, 2 * a.flip(1))


def test_a_persistent_kernel_has_the_blocks_that_run_at_once(kernel):
    out = torch.zeros(100, dtype=torch.int32)
    text = "__global__ void x(int* out) { if (threadIdx.x == 0) out[blockIdx.x] = gridDim.x; }"
    kernel(text)(grid=Persistent(100), out=out)
    assert out.tolist() == [3, 3, 3] + [0] * 97


def test_scalars_reach_the_kernel(kernel):
    out = torch.zeros(3)
    text = """
    #include "common.cuh"
    __global__ void x(float* out, i64 big, float f, bool yes) { out[0] = big >> 33; out[1] = f; out[2] = yes; }
    """
    kernel(text)(threads=1, out=out, big=5 << 33, f=0.25, yes=True)
    assert out.tolist() == [5.0, 0.25, 1.0]


def test_what_is_not_emulated_is_named(kernel):
    text = '__global__ void x(int* out) { asm volatile("tcgen05.fence::before_thread_sync;"); }'
    with pytest.raises(RuntimeError, match=r"the PTX instruction tcgen05.fence::before_thread_sync is not emulated"):
        kernel(text)(out=torch.zeros(1, dtype=torch.int32))


def test_what_does_not_compile_is_said(kernel):
    with pytest.raises(CompileFailed, match=r"x.cu does not build for the emulator:(.|\n)*not_there"):
        kernel("__global__ void x(int* out) { not_there(out); }")(out=torch.zeros(1, dtype=torch.int32))


def test_a_damaged_library_is_built_again(kernel):
    text = "__global__ void x(int* out) { out[threadIdx.x] = 41 + threadIdx.x; }"
    first = kernel(text)
    path = build.library_of(first.source.path, "x")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\x7fELF cut short")
    out = torch.zeros(2, dtype=torch.int32)
    first(threads=2, out=out)
    assert out.tolist() == [41, 42] and isinstance(ctypes.CDLL(str(path)), ctypes.CDLL)


# The translation

CALL = """
[&] { static const ::emulator::Program* const program_ = ::emulator::parse("mov.u32 %0, %1;");
::emulator::Operand operands_[] = {::emulator::out(a[f(1)]), ::emulator::in(b + ")"[0])};
::emulator::execute(program_, operands_); }();
""".strip().replace("\n", " ")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [('asm volatile("" ::: "memory");', "((void)0);"),
     ('asm("mov.u32 %0, %1;" : "=r"(a[f(1)]) : "r"(b + ")"[0]));', CALL),
     ("__shared__ int x;", "auto& x = ::emulator::shared_variable<int>([]{});"),
     ("__shared__ __attribute__((aligned(16))) Row<T, 4> rows[2][N];",
      "auto& rows = ::emulator::shared_variable<Row<T, 4>[2][N]>([]{});"),
     ("extern __shared__ __attribute__((aligned(1024))) unsigned char smem[];",
      "unsigned char* const smem = reinterpret_cast<unsigned char*>(::emulator::dynamic_shared());"),
     ("int asmx = 1; // nothing", "int asmx = 1; // nothing")],
)  # fmt: skip
def test_the_translation(text, wanted):
    assert translated(text) == wanted
