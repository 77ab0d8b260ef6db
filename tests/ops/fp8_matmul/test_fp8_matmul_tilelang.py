"""fp8_matmul in TileLang: four variants that build for wgmma, refuse what is not theirs, and are right."""

import dataclasses

import pytest
import torch

from tilery import languages
from tilery.base.spec import case
from tilery.core.cases import call_for, specs_for
from tilery.hardware import device, toolkit
from tilery.measure.check import check
from tilery.measure.place import place
from tilery.ops import fp8_matmul

if why := languages.missing("tilelang"):
    pytest.skip(why, allow_module_level=True)
from tilery.ops.fp8_matmul import tilelang_kernels
from tilery.ops.fp8_matmul.tilelang_kernels import Config

kernel = tilelang_kernels.fp8_matmul

VARIANTS = {
    "base": Config("base", 64, 128, 128, 3, 128),
    "swapAB": Config("swapAB", 128, 16, 128, 4, 128, c_scale_local=True, b_scale_shm=True),
    "splitK": Config("splitK", 64, 64, 128, 3, 128, split_k=2, c_scale_local=True, a_scale_shm=True),
    "splitK_swapAB": Config("splitK_swapAB", 64, 32, 128, 4, 128, split_k=4, b_scale_shm=True),
}


@pytest.fixture
def sm_90():
    with device.pretend("sm_90"):
        yield


for_sm_90 = pytest.mark.usefixtures("sm_90")


def call_of(m=64, n=512, k=1024, **more):
    return call_for(fp8_matmul, case(m=m, n=n, k=k, **more))


@for_sm_90
@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_a_variant_multiplies_fp8_by_wgmma_in_the_shared_memory_it_says(config, compiler):
    """More would be products of scales for every stage: those are loaded ahead, and overwritten while still read."""
    specs = specs_for(fp8_matmul, case(m=64, n=512, k=1024))
    made = compiler.compile("fp8_matmul", "tilelang", specs, "sm_90", config)
    assert "QGMMA" in toolkit.sass(made.cubin) and made.spills == 0
    reserved = 1024  # by the driver
    assert made.shared - reserved == tilelang_kernels._shared(config, itemsize=2)
    assert made.code["cuda"].count("__global__ void __launch_bounds__") == (2 if config.split_k > 1 else 1)


@for_sm_90
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"kernel_type": "swapBA"}, "kernel_type must be one of base, swapAB, splitK, splitK_swapAB, got 'swapBA'"),
        ({"split_k": 2}, "split_k must be 1 for base, got 2; splitK and splitK_swapAB cut K"),
        ({"kernel_type": "splitK"}, "split_k must be 2 or more and divide K / 128 = 8, got 1"),
        ({"kernel_type": "splitK_swapAB", "split_k": 3}, "split_k must be 2 or more and divide K / 128 = 8, got 3"),
        ({"b_scale_shm": True}, "base takes a_scale_shm: a comes first; got b_scale_shm"),
        ({"kernel_type": "swapAB", "a_scale_shm": True}, "swapAB takes b_scale_shm: a comes second; got a_scale_shm"),
        ({"block_k": 64}, "block_k must be 128, as far as a scale goes, got 64"),
        ({"block_m": 48}, "block_m and block_n must be powers of two from 16 to 256, got 48 and 128"),
        ({"block_n": 256}, "block_n must be at most 128, as far as a scale of b goes, got 256"),
        ({"kernel_type": "swapAB", "block_m": 256}, "block_m must be at most 128, as far as a scale of b"),
        ({"threads": 64}, "threads must be 128 or 256, one or two warpgroups, got 64"),
        ({"block_m": 16, "block_n": 16, "threads": 128}, "every warp must have 16 × 8 of block_m × block_n"),
        ({"num_stages": 17}, "num_stages must be 0 to 16, got 17"),
        ({"num_stages": 12}, "needs 296192 bytes of shared memory, a block has 232448"),
    ],
)  # fmt: skip
def test_a_config_that_does_not_fit_is_refused(changed, said):
    config = dataclasses.replace(VARIANTS["base"], **changed)
    assert said in kernel.refusal(call_of(), config)


@for_sm_90
def test_two_formats_are_refused():
    assert "one format, got a in e4m3 and b in e5m2" in kernel.refusal(call_of(dtype_b="e5m2"))


@for_sm_90
@pytest.mark.parametrize("m", [0, 1, 16, 24, 48, 64, 128, 256, 4096])
def test_configs_are_few_and_fit(m):
    given = call_of(m=m, n=4096, k=7168)
    found = kernel.configs(given)
    assert 10 <= len(found) == len(set(found)) <= 40
    assert all(kernel.refusal(given, c) is None for c in (*found, kernel.default(given)))
    assert {c.kernel_type for c in found} >= ({"swapAB", "splitK_swapAB"} if m <= 256 else {"base", "swapAB"})
    assert all(c.tile[0] < 4 * max(m, 16) for c in found)


@for_sm_90
def test_few_rows_are_the_narrow_side_by_default_and_few_tiles_are_cut_along_k():
    def default(m, n, k):
        c = kernel.default(call_of(m=m, n=n, k=k))
        return c.kernel_type, c.tile[0], c.split_k

    assert default(1, 16384, 4096) == ("swapAB", 16, 1)
    assert default(24, 2048, 7168) == ("splitK_swapAB", 32, 4)  # 8 parts of 7 blocks would be too short
    assert default(16, 512, 3 * 128) == ("swapAB", 16, 1)
    assert default(4096, 4096, 7168) == ("base", 128, 1)


def test_parts_of_k_have_a_workspace_and_cost_its_bytes():
    given, split = call_of(m=17, n=200), VARIANTS["splitK"]
    (parts,) = kernel.workspace(given, split).values()
    assert parts.shape == (2, 17, 200) and parts.dtype == torch.float32
    assert kernel.workspace(given, VARIANTS["base"]) == {}
    one = dataclasses.replace(split, kernel_type="base", split_k=1)
    whole, part = (kernel.estimate(given, c) for c in (one, split))
    assert part.blocks == 2 * whole.blocks and part.flops * 2 == whole.flops
    assert part.bytes == whole.bytes // 2 + 2 * 4 * 17 * 64


@pytest.mark.parametrize(
    ("shared", "local", "scales"), [(False, False, "row"), (True, True, "column")], ids=["plain", "shared"]
)
@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_variants_are_right_and_give_the_same_bits(config, shared, local, scales):
    """Rows and columns that fill no tile, and as many blocks of K as go through the stages several times."""
    where = place(fp8_matmul, "tilelang")
    if where.device is None:
        pytest.skip("needs a GPU; built by test_a_variant_multiplies_fp8_by_wgmma_in_the_shared_memory_it_says")
    flag = "b_scale_shm" if config.swapped else "a_scale_shm"
    config = dataclasses.replace(config, c_scale_local=local, a_scale_shm=False, b_scale_shm=False)
    config = dataclasses.replace(config, **{flag: shared})
    problem = case(m=81, n=200, k=16 * 128, out="fp32", scales=scales)
    assert check(fp8_matmul, "tilelang", problem, where.device, config=config).errors[0] < 1e-3
    args = fp8_matmul.complete((), fp8_matmul.inputs(**problem.params, device=where.device, seed=3))
    first, *others = (fp8_matmul(*args, backend="tilelang", config=config) for _ in range(10))
    assert all(torch.equal(first, other) for other in others)
