"""The emulator of CUDA C++: small kernels are right, and each mistake planted in one is noticed."""

import ctypes
import itertools

import pytest
import torch

from tilery import languages

if why := languages.missing("cuda"):
    pytest.skip(why, allow_module_level=True)

from tilery.base.errors import CompileFailed
from tilery.base.launch import Argument, Launch, Persistent
from tilery.base.spec import TensorSpec
from tilery.languages import cuda_emulator, cuda_glue
from tilery.languages.cuda_emulator import build
from tilery.languages.cuda_emulator.translate import translated
from tilery.languages.cuda_source import Source
from tilery.languages.tensor_maps import of_matrix

if why := cuda_emulator.refusal():
    pytest.skip(why, allow_module_level=True)
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU that is here, not emulated")

CPU = torch.device("cpu")
_TIMES = 12  # launches: each has another order of threads


class Kernel:
    """A kernel `x` of this text, whose parameters are its tensors by name."""

    def __init__(self, folder, text):
        path = folder / "x.cu"
        path.write_text(text, encoding="utf-8")
        self.source = Source(path, "x")

    def __call__(self, *, grid=1, threads=128, shared=0, cluster=1, maps=None, **given):
        tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
        args = {name: Argument.at_slot(TensorSpec.of(t), slot) for slot, (name, t) in enumerate(tensors.items())}
        for name, rows in (maps or {}).items():
            args[name] = of_matrix(args[name], rows)
        args = {name: args.get(name, value) for name, value in given.items()}
        launch = Launch(self.source, grid, args, options={"threads": threads, "shared": shared}, cluster=cluster)
        cuda_glue.bind(launch, CPU)(tuple(tensors.values()))


@pytest.fixture
def kernel(tmp_path):
    """Makes a kernel; `broken=(before, after)` plants a mistake."""
    made = itertools.count()

    def make(text, broken=None):
        if broken is not None:
            assert text.count(broken[0]) == 1, broken[0]
            text = text.replace(*broken)
        folder = tmp_path / str(next(made))
        folder.mkdir()
        return Kernel(folder, text)

    return make


def wrong(run, is_right):
    """Whether some of several launches gave a wrong result, or an error."""
    for _ in range(_TIMES):
        try:
            run()
        except CompileFailed:
            raise
        except RuntimeError:
            return True
        if not is_right():
            return True
    return False


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


# Copies that complete later

BULK = """
#include "mbarrier.cuh"
__global__ void x(const float* a, float* out) {
    __shared__ alignas(16) float held[128];
    __shared__ Mbarrier full;
    if (threadIdx.x == 0) {
        full.init();
        fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        full.arrive_expect_tx(512);
        full.bulk_load(held, a, 512);
    }
    full.wait(0);
    out[threadIdx.x] = held[threadIdx.x];
}
"""


def test_a_bulk_copy_completes_on_its_barrier(kernel):
    a, out = torch.randn(128), torch.empty(128)
    kernel(BULK)(a=a, out=out)
    assert torch.equal(out, a)


@pytest.mark.parametrize(
    ("broken", "said"),
    [(("    full.wait(0);\n", ""), None),
     (("        full.init();\n", ""), "an mbarrier was used before it was initialised"),
     (("arrive_expect_tx(512)", "arrive_expect_tx(528)"), r"warp 0 at mbarrier.try_wait \(shared memory \+ \d+\)"),
     (("held, a, 512", "held, a + 1, 512"), "must be multiples of 16 bytes"),
     (("bulk_load(held, a, 512)", "arrive()"), "more arrivals at an mbarrier|no thread can go on"),
     (("full.wait(0);", "if (threadIdx.x) full.wait(0); else return;"), None)],
    ids=["no wait", "no init", "too many bytes", "misaligned", "two arrivals", "a thread that leaves"],
)  # fmt: skip
def test_mistakes_with_a_bulk_copy_are_noticed(kernel, broken, said):
    a, out = torch.randn(132), torch.empty(128)
    run = kernel(BULK, broken)
    if said is not None:
        with pytest.raises(RuntimeError, match=said):
            run(a=a, out=out)
    else:
        assert wrong(lambda: run(a=a, out=out.fill_(0)), lambda: torch.equal(out, a[:128]))


CP_ASYNC = """
#include "common.cuh"
__global__ void x(const float* a, float* out) {
    __shared__ alignas(16) float held[512];
    const unsigned to = smem_address(held + threadIdx.x * 4);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(a + threadIdx.x * 4));
    asm volatile("cp.async.commit_group;");
    asm volatile("cp.async.wait_group 0;");
    for (int i = 0; i < 4; ++i) out[threadIdx.x * 4 + i] = held[threadIdx.x * 4 + i];
}
"""


def test_cp_async_completes_where_it_is_waited_for(kernel):
    a, out = torch.randn(512), torch.empty(512)
    kernel(CP_ASYNC)(a=a, out=out)
    assert torch.equal(out, a)
    broken = kernel(CP_ASYNC, ("cp.async.wait_group 0;", "cp.async.wait_group 1;"))
    assert wrong(lambda: broken(a=a, out=out.fill_(0)), lambda: torch.equal(out, a))


@pytest.mark.parametrize(
    ("form", "read"),
    [
        ('.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(a + threadIdx.x * 4), "l"(0ull)', 4),
        (' [%0], [%1], 16, %2;" ::"r"(to), "l"(a + threadIdx.x * 4), "r"(8)', 2),
        ('.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(a + threadIdx.x * 4), "r"(8), "l"(0ull)', 2),
    ],
    ids=["policy", "bytes", "both"],
)
def test_cp_async_fills_with_zeros_what_it_does_not_read(kernel, form, read):
    """The number of bytes to read stands before an L2 policy, which is a number too."""
    a, out = torch.randn(512), torch.empty(512)
    plain = ' [%0], [%1], 16;" ::"r"(to), "l"(a + threadIdx.x * 4)'
    kernel(CP_ASYNC, (plain, form))(a=a, out=out)
    assert torch.equal(out, torch.where(torch.arange(512) % 4 < read, a, 0))


# Sums in memory that blocks add to in turns

IN_TURNS = """
#include "ordered_sums.cuh"
__global__ void x(const float* a, float* sums, int* done) {
    __shared__ alignas(16) float held[32];
    held[threadIdx.x] = a[blockIdx.x * 32 + threadIdx.x];
    fence_async_proxy();
    __syncwarp();
    if (threadIdx.x > 0) return;
    for (int i = 0; i < 8; ++i) {
        const Turns turns{done + i};
        turns.wait_for(blockIdx.x);
        if (blockIdx.x == 0) bulk_store(sums + i * 32, held, 128);
        else bulk_add(sums + i * 32, held, 128);
        bulk_commit();
        bulk_wait();
        turns.pass_on();
    }
}
"""


def in_turns(kernel, broken=None):
    """Runs it for terms whose sum in fp32 depends on their order; whether sums and counters are right."""
    a = torch.tensor([1.0, 2.0**30, -(2.0**30), 3.0]).view(4, 1) * torch.randint(1, 9, (4, 32))
    sums, done = torch.full((8, 32), torch.nan), torch.zeros(8, dtype=torch.int32)
    kernel(IN_TURNS, broken)(grid=4, threads=32, a=a, sums=sums, done=done)
    wanted = a[0] + a[1] + a[2] + a[3]
    return torch.equal(sums, wanted.expand(8, 32)) and done.tolist() == [4] * 8


def test_blocks_add_to_memory_in_turns(kernel):
    assert all(in_turns(kernel) for _ in range(3))


@pytest.mark.parametrize(
    "broken",
    [("turns.wait_for(blockIdx.x);", ""), ("bulk_wait();", "bulk_wait_read();"),
     ("if (blockIdx.x == 0) bulk_store(sums + i * 32, held, 128);\n        else ", "")],
    ids=["no wait for a turn", "no wait for the copy", "nothing to add to"],
)  # fmt: skip
def test_mistakes_with_turns_are_noticed(kernel, broken):
    assert wrong(lambda: None, lambda: in_turns(kernel, broken))


def test_blocks_that_wait_for_a_turn_that_never_comes_are_a_deadlock(kernel):
    with pytest.raises(RuntimeError, match=r"no thread can go on(.|\n)*block \d+, warp 0 at ld.acquire: 1 threads"):
        in_turns(kernel, ("turns.pass_on();", ""))


def test_a_bulk_copy_to_a_misaligned_address_is_noticed(kernel):
    with pytest.raises(RuntimeError, match="must be multiples of 16 bytes"):
        in_turns(kernel, ("bulk_store(sums + i", "bulk_store(sums + 1 + i"))


# TMA and wgmma: c [64, 64] = a [64, 64] bᵀ [64, 64], rows and columns outside read as zeros

PRODUCT = """
#include "tma.cuh"
#include "wgmma.cuh"
__global__ void x(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, float* out) {
    extern __shared__ __align__(1024) unsigned char smem[];
    __shared__ Mbarrier full;
    if (threadIdx.x == 0) {
        full.init();
        fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        full.arrive_expect_tx(2 * 8192);
        tma_load_2d(full, smem, a, 0, 0);
        tma_load_2d(full, smem + 8192, b, 0, 0);
    }
    full.wait(0);
    float acc[32];
    for (float& each : acc) each = 0.0f;
    warpgroup_arrive(acc);
    for (int k = 0; k < 4; ++k)
        WgmmaSS<bf16, bf16, 64>::mma(acc, smem_desc_k_major(smem) + 2 * k, smem_desc_k_major(smem + 8192) + 2 * k, 1);
    warpgroup_commit_batch();
    warpgroup_wait_all(acc);
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, col = threadIdx.x % 4 * 2;
    for (int i = 0; i < 32; ++i) out[(row + i / 2 % 2 * 8) * 64 + i / 4 * 8 + col + i % 2] = acc[i];
}
"""


def operands():
    a, b = (
        torch.randint(-4, 5, (60, 56)).to(torch.bfloat16) for _ in range(2)
    )  # what is outside of them reads as zeros
    wanted = torch.zeros(64, 64)
    wanted[:60, :60] = a.float() @ b.float().T
    return a, b, torch.empty(64, 64), wanted


def test_tma_and_wgmma_multiply(kernel):
    a, b, out, wanted = operands()
    run = kernel(PRODUCT)
    for _ in range(3):
        run(shared=16384, maps={"a": 64, "b": 64}, a=a, b=b, out=out.fill_(torch.nan))
        assert torch.equal(out, wanted)


@pytest.mark.parametrize(
    ("broken", "said"),
    [(("    warpgroup_wait_all(acc);\n", ""), None),
     (("    full.wait(0);\n", ""), None),
     (("tma_load_2d(full, smem + 8192", "tma_load_2d(full, smem + 8200"), "multiples of 128 bytes"),
     (("tma_load_2d(full, smem, a, 0, 0)", "tma_load_2d(full, smem, a, 4, 0)"), "multiples of 16 bytes"),
     (("smem_desc_k_major(smem + 8192) + 2 * k", "smem_desc_k_major(smem + 8192) + 2 * k + threadIdx.x / 64"),
      "threads of a warpgroup issue different wgmmas"),
     (("k < 4;", "k < (threadIdx.x < 32 ? 3 : 4);"), "no thread can go on")],
    ids=["no wgmma wait", "no TMA wait", "misaligned", "between 16 bytes", "different descriptors", "some threads"],
)  # fmt: skip
def test_mistakes_with_tma_and_wgmma_are_noticed(kernel, broken, said):
    a, b, out, wanted = operands()
    run = kernel(PRODUCT, broken)
    given = {"shared": 16384, "maps": {"a": 64, "b": 64}, "a": a, "b": b, "out": out}
    if said is not None:
        with pytest.raises(RuntimeError, match=said):
            run(**given)
    else:
        assert wrong(lambda: run(**given), lambda: torch.equal(out, wanted))


def test_tiles_outside_of_shared_memory_are_noticed(kernel):
    a, b, out, _ = operands()
    with pytest.raises(RuntimeError, match="8192 bytes at 24576 are outside of the 32752 bytes of shared memory"):
        kernel(PRODUCT)(shared=16384 - 16, maps={"a": 64, "b": 64}, a=a, b=b, out=out)


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
