"""Element-wise Triton kernels: a block is right wherever it lies, and whole blocks pay for no mask."""

import re

import pytest
import torch

from tilery import languages
from tilery.base.spec import case
from tilery.core import policy
from tilery.core.cases import call_for, specs_for
from tilery.core.op import REGISTRY
from tilery.measure.check import check
from tilery.measure.place import place

if why := languages.missing("triton"):
    pytest.skip(why, allow_module_level=True)

from tilery.ops.quantize import triton_kernels as quantize_kernels
from tilery.ops.rows import triton_rows
from tilery.ops.rows.triton_rows import Config, grid_of

# Padded rows stay rows: end to end they would be one. Of 384, blocks of 128 are even and one of 256 is ragged.
PADDED = {"m": 3, "n": 384, "dtype": "fp16", "layout": "padded"}
PROBLEMS = [
    ("silu_mul", {}),
    ("silu_mul", {"packed": True}),
    ("gelu_mul", {}),
    ("silu_mul_backward", {}),
    ("silu_mul_packed_backward", {}),
    ("relu_squared", {}),
    ("relu_squared_backward", {}),
    ("activation_backward", {"activation": "gelu"}),
    ("cast", {"to": "fp32"}),
    ("dropout", {}),
    ("embedding", {"v": 7, "outside": True}),
    ("embedding_backward", {"v": 3, "outside": True}),
    ("dequantize_fp8", {}),
    ("dequantize_fp8", {"per": "block"}),
    ("quantize_fp8", {"per": "group"}),
    ("quantize_fp8", {"per": "tensor"}),
    ("silu_mul_fp8", {"per": "group"}),
]
BLOCKS = {"even": 128, "ragged": 256, "large": 256}


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize(("op", "more"), PROBLEMS, ids=str)
def test_every_kind_of_grid_is_right(op, more, kind, monkeypatch):
    found = place(REGISTRY[op], "triton")
    if found.device is None:
        pytest.skip(found.reason)
    if kind == "large":
        monkeypatch.setattr(triton_rows, "_MOST_ROWS", 2)
    problem, config = case(**PADDED, **more), Config(BLOCKS[kind], num_warps=1)
    assert grid_of(3, 384, config)[1]["GRID"] == kind
    assert check(REGISTRY[op], "triton", problem, found.device, config=config).refused is None


@pytest.mark.parametrize("kind", ["ragged", "large"])
def test_nothing_is_written_past_a_row(kind, monkeypatch):
    """One row alone: where there are several, the next would write it again."""
    op, found = REGISTRY["relu_squared"], place(REGISTRY["relu_squared"], "triton")
    if found.device is None:
        pytest.skip(found.reason)
    if kind == "large":
        monkeypatch.setattr(triton_rows, "_LONGEST", 0)
    x, y = torch.ones(384, device=found.device), torch.full((512,), 7.0, device=found.device)
    op.plan(op.specs((x,)), "triton", Config(256, num_warps=1)).launch((y[:384],), (x,))
    assert y.tolist() == [1.0] * 384 + [7.0] * 128


@pytest.mark.parametrize("n", [1, 128, 200])
def test_one_long_row_in_a_large_grid(n, monkeypatch):
    """Rows beyond 2**31 elements have such grids; n = 1 is a constant to Triton."""
    found = place(REGISTRY["relu_squared"], "triton")
    if found.device is None:
        pytest.skip(found.reason)
    monkeypatch.setattr(triton_rows, "_LONGEST", 0)
    config = Config(128, num_warps=1)
    assert grid_of(1, n, config) == ((-(-n // 128), 1), {"BLOCK": 128, "GRID": "large"})
    check(REGISTRY["relu_squared"], "triton", case(m=1, n=n, dtype="fp32"), found.device, config=config)


def test_grids():
    config = Config(128, num_warps=1)

    def of(m, n):
        grid, constants = grid_of(m, n, config)
        assert constants["BLOCK"] == 128
        return grid, constants["GRID"]

    assert of(5, 256) == ((2, 5), "even")
    assert of(5, 257) == ((3, 5), "ragged")
    assert of(1, 0) == ((0, 1), "ragged")  # a launch on nothing must be masked
    assert of(65535, 256) == ((2, 65535), "even")
    assert of(65536, 256) == ((131072, 1), "large")
    assert of(1, 2**31 - 1) == ((2**24, 1), "ragged")
    assert of(1, 2**31) == ((2**24, 1), "large")


@pytest.mark.parametrize(("n", "wide"), [(2**31 - 1, False), (2**31, True)])
def test_blocks_start_in_64_bits_where_a_row_needs_them(n, wide, compiler):
    specs = specs_for(REGISTRY["relu_squared"], case(m=1, n=n, dtype="bf16"))
    ir = compiler.compile("relu_squared", "triton", specs, "sm_90", Config(1024, num_warps=4)).code["ir"]
    narrow = re.findall(r"arith\.muli .* : i32", ir)
    assert bool(narrow) == (not wide)


ACCESS = re.compile(r"(@!?%p\d+ )?(?:ld|st)\.global")


@pytest.mark.parametrize(("n", "masked"), [(2048, False), (2040, True)])
@pytest.mark.parametrize(
    "op",
    [
        "silu_mul",
        "silu_mul_backward",
        "relu_squared",
        "relu_squared_backward",
        "activation_backward",
        "cast",
        "dropout",
        "dequantize_fp8",
    ],
)
def test_only_ragged_blocks_are_masked(op, n, masked, compiler):
    problem = case(m=1, n=n, dtype="bf16")
    assert policy.problem_refusal(REGISTRY[op], "triton", call_for(REGISTRY[op], problem)) is None
    specs = specs_for(REGISTRY[op], problem)
    ptx = compiler.compile(op, "triton", specs, "sm_90", Config(1024, num_warps=4)).code["ptx"]
    found = ACCESS.findall(ptx)
    assert len(found) >= 2 and any(found) == masked
    assert not re.search(r"\bbra\b", ptx)


@pytest.mark.parametrize("most", [1, 4])
def test_more_blocks_than_maxima(most, monkeypatch):
    """For a large tensor with one scale, a program takes several blocks before it writes its maximum."""
    op = REGISTRY["quantize_fp8"]
    monkeypatch.setattr(quantize_kernels, "_MOST_MAXIMA", most)
    for params in ({"layout": "padded"}, {"special": "nan"}, {"pow2": True}):
        problem = case(m=7, n=300, dtype="fp32", per="tensor", **params)
        assert check(op, "triton", problem, place(op, "triton").device, config=Config(128, 4)).refused is None
