"""Rows of any length: which are cut in pieces, that a row is right however it is cut, how wide its accesses are."""

import re

import pytest
import torch

from tilery import languages
from tilery.base.spec import TensorSpec, case
from tilery.core import policy
from tilery.core.cases import call_for, specs_for
from tilery.core.op import REGISTRY
from tilery.hardware.gpu import pretend
from tilery.measure.check import check
from tilery.measure.place import place

if why := languages.missing("triton"):
    pytest.skip(why, allow_module_level=True)

from tilery.languages.triton_glue import vector_of
from tilery.ops.norms.triton import tiles
from tilery.ops.norms.triton.tiles import MOST_PIECES, cut, cuts
from tilery.ops.softmax import triton_kernels as softmax_kernels

LENGTHS = (1536, 2048, 2880, 3584, 4096, 5120, 7168, 8192, 11008, 13696, 14336, 18432, 27648, 28672)
NORMS = ("rms_norm", "add_rms_norm", "layer_norm", "rms_norm_fp8", "add_rms_norm_fp8")


def test_how_rows_are_cut():
    for n in LENGTHS:
        whole = 1 << (n - 1).bit_length()
        for itemsize in (2, 4):
            if found := cut(n, itemsize):
                assert n <= found.block * found.pieces <= whole, n
    assert all(cut(2**k, 2) is None for k in range(16))
    assert cut(5120, 2) == (2048, 8, 3) and cut(28672, 2) == (2048, 8, 14)
    assert cut(28672, 4) == (4096, 16, 7)  # of fp32 14 pieces would take 112 registers
    assert cut(3584, 2) is None  # as measured
    assert all(2 <= c.pieces <= MOST_PIECES for n in LENGTHS for c in cuts(n))


@pytest.mark.parametrize("n", [257, 300, 384])
@pytest.mark.parametrize("name", [*NORMS, "softmax", "log_softmax"])
def test_rows_in_pieces_are_right(name, n):
    """Two rows a program, of which the last has one; the last piece is nearly empty, or full."""
    where = place(REGISTRY[name], "triton").device
    config = tiles.Config(2, 128, 4, 3) if name in NORMS else softmax_kernels.Config(128, 4, pieces=3)
    for more in [{"per": "token"}, {"per": "group"}] if name.endswith("fp8") else [{}, {"layout": "padded"}]:
        for dtype in ("fp32", "fp16"):
            problem = case(m=5, n=n, dtype=dtype, **more)
            assert check(REGISTRY[name], "triton", problem, where, config=config).refused is None


@pytest.mark.parametrize("name", ["rms_norm", "softmax"])
def test_special_values_in_pieces(name):
    where = place(REGISTRY[name], "triton").device
    config = tiles.Config(1, 64, 1, 4) if name in NORMS else softmax_kernels.Config(64, 1, pieces=4)
    for special in ("nan", "inf", "-inf"):
        problem = case(m=3, n=200, dtype="fp32", special=special)
        assert check(REGISTRY[name], "triton", problem, where, config=config).refused is None


def test_configs_with_pieces():
    op, call = REGISTRY["rms_norm"], call_for(REGISTRY["rms_norm"], case(m=3, n=300, dtype="bf16"))
    assert "pieces must be 1 to 16, got 17" in policy.problem_refusal(op, "triton", call, tiles.Config(1, 128, 4, 17))
    assert "does not fit" in policy.problem_refusal(op, "triton", call, tiles.Config(1, 4096, 1, 2))
    op, call = REGISTRY["softmax"], call_for(REGISTRY["softmax"], case(m=3, n=300, dtype="bf16"))
    shared = softmax_kernels.Config(128, 4, splits=2, pieces=2)
    assert "1 where programs share a row" in policy.problem_refusal(op, "triton", call, shared)
    with pretend("h200"):
        found = REGISTRY["softmax"].kernel("triton").configs(call_for(op, case(m=8192, n=5120, dtype="bf16")))
    assert softmax_kernels.Config(1024, 4, pieces=5) in found


@pytest.mark.parametrize(("name", "loads"), [("softmax", 3), ("layer_norm", 9)])
def test_pieces_are_loaded_16_bytes_at_a_time(name, loads, compiler):
    specs = specs_for(REGISTRY[name], case(m=512, n=5120, dtype="bf16"))
    ptx = compiler.compile(name, "triton", specs, "sm_90").code["ptx"]
    assert ptx.count("ld.global.v4.b32") == loads and ptx.count("ld.global") == loads
    assert ptx.count("st.global.v4.b32") == 3


def test_many_rows_of_a_power_of_two_are_read_again_and_others_wait_in_pieces():
    op = REGISTRY["rms_norm"]

    def of(m, n):
        with pretend("h200"):
            found = op.kernel("triton").default(call_for(op, case(m=m, n=n, dtype="bf16")))
        return found.block, found.num_warps, found.pieces

    assert of(8192, 4096) == (2048, 8, 1) and of(8192, 8192) == (4096, 16, 1)  # as measured
    assert of(8192, 5120) == of(512, 5120) == (2048, 8, 3)
    assert of(8192, 7168) == (2048, 8, 4)
    assert of(512, 18432) == (2048, 8, 9)


@pytest.mark.parametrize(("n", "layout"), [(3000, "contiguous"), (3000, "padded"), (1000, "contiguous")])
@pytest.mark.parametrize("op", ["silu_mul", "gelu_mul", "softmax", "rms_norm", "add_rms_norm", "layer_norm"])
def test_rows_that_8_divides_are_moved_16_bytes_at_a_time(op, n, layout, compiler):
    """Triton itself asks only whether 16 divides an integer."""
    specs = specs_for(REGISTRY[op], case(m=1025, n=n, dtype="bf16", layout=layout))
    ptx = compiler.compile(op, "triton", specs, "sm_90").code["ptx"]
    narrow = re.findall(r"(?:ld|st)\.global\S*\.(?:b16|u16|b32)", re.sub(r"\.v4\.b32", "", ptx))
    assert "ld.global" in ptx and not narrow


def test_what_a_kernel_is_told_of_its_steps():
    x, wide = (
        TensorSpec.contiguous((3, 8), torch.bfloat16, "cuda:0"),
        TensorSpec.contiguous((3, 8), torch.float32, "cuda:0"),
    )
    assert vector_of(x, 4096, 8192) == vector_of(x, 16) == vector_of(x) == 1  # Triton sees these itself
    assert (
        vector_of(x, 3000, 3000) == vector_of(x, 3000, 4096) == 8 and vector_of(wide, 3000) == vector_of(wide, 4) == 4
    )
    assert vector_of(x, 3000, 3001) == vector_of(x, 4) == vector_of(wide, 2) == 1
