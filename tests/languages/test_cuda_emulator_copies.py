"""The emulator's copies, wgmma and sums in turns are right, and each mistake planted in them is noticed."""

import pytest
import torch
from emulated import WITHOUT_A_GPU, wrong

pytestmark = WITHOUT_A_GPU


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
