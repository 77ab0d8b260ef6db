"""Products of a few rows without tensor cores: when dispatch takes them, what they refuse, any number of rows."""

import itertools

import pytest
import torch

from tilery import languages
from tilery.base.spec import case
from tilery.core import policy
from tilery.core.cases import call_for, specs_for
from tilery.core.op import REGISTRY
from tilery.hardware import device
from tilery.measure.check import check
from tilery.measure.place import place

if why := languages.missing("cuda"):
    pytest.skip(why, allow_module_level=True)

from tilery.ops.matmul.call import warps_of_k
from tilery.ops.matmul.cuda.gemv import Config

kernel = REGISTRY["matmul"].kernel("cuda.gemv")


def call_of(op="matmul", **more):
    return call_for(REGISTRY[op], case(**{"m": 1, "n": 512, "k": 1024, "dtype": "bf16"} | more))


@pytest.mark.parametrize(
    ("op", "more", "taken"),
    [
        ("matmul", {}, "cuda.gemv"),
        ("matmul", {"m": 2}, "cuda.hopper"),
        ("matmul", {"k": 1152}, "cuda.hopper"),  # 144 loads of a row, for warps of 32
        ("matmul", {"k": 3584}, "cuda.gemv"),
        ("matmul", {"k": 1008}, "cuda.hopper"),  # lines that begin at multiples of 16 bytes alone
        ("matmul", {"layout_b": "contiguous"}, "cuda.hopper"),
        ("matmul", {"k": 1020}, "cuda.hopper"),
        ("matmul_add", {}, "cuda.gemv"),
        ("linear", {"bias": True, "residual": True}, "cuda.gemv"),
        ("linear", {"m": 1, "batch": 3}, "cuda.hopper"),  # three rows
        ("linear_silu_mul", {}, "cuda.gemv"),
        ("bmm", {"batch": 4, "layout_b": "transposed"}, "cuda.hopper"),  # was not measured
    ],
)
def test_dispatch_takes_it_for_one_row(op, more, taken, monkeypatch):
    monkeypatch.setattr(device, "name", lambda where: "a GPU that nothing is tuned for")
    with device.pretend("sm_90"):
        plan = policy.decide(REGISTRY[op], call_of(op, **more), None, None)
    assert (plan.kernel, plan.source) == (taken, "default")


@pytest.mark.parametrize(
    ("k", "warps"),
    [(1000, 4), (1024, 4), (1152, None), (2048, 8), (2304, None), (3072, 4), (4096, 8), (14336, 8), (8, None)],
)
def test_warps_share_k_so_that_their_loads_are_full(k, warps):
    assert warps_of_k(k) == warps


def test_a_cpu_is_not_asked_for_it():
    call = call_for(REGISTRY["matmul"], case(m=1, n=8, k=16, dtype="bf16"), "cpu")
    assert REGISTRY["matmul"].asked(call)[0] == "numba"


@pytest.mark.parametrize(
    ("more", "config", "said"),
    [
        ({}, Config(4, 8, 1), None),
        ({}, Config(3, 8, 1), "must be 1, 2, 4 or 8"),
        ({"m": 8}, Config(8, 1, 1), "at most 32 values of c"),
        ({}, Config(4, 1, 8), "at most 16 loads"),
        ({"m": 9}, None, "at most 8 rows, got 9"),
        ({"layout": "transposed", "m": 2}, None, "a contiguous along K"),
        ({"layout": "transposed"}, None, None),  # of one row it makes no difference
    ],
)
def test_what_is_refused(more, config, said):
    why = kernel.refusal(call_of(**more), config)
    assert why is None if said is None else said in why


@pytest.mark.parametrize(("n", "stride", "refused"), [(512, 1028, True), (512, 1032, False), (1, 1028, False)])
def test_lines_start_at_multiples_of_16_bytes(n, stride, refused):
    """But for a single one, which has no next."""
    a, b, *rest = specs_for(REGISTRY["matmul"], case(m=1, n=n, k=1024, dtype="bf16"))
    why = kernel.refusal(REGISTRY["matmul"].call((a, b._replace(strides=(1, stride)), *rest)))
    assert why == ("takes b contiguous along K, with lines that start at multiples of 16 bytes" if refused else None)


@pytest.mark.parametrize("m", range(1, 9))
def test_every_number_of_rows_is_right_in_several_configs(m):
    """n and K leave a part of a warp's columns, and of its loads."""
    where = place(REGISTRY["matmul"], "cuda.gemv").device
    if where is None:
        pytest.skip("needs a GPU or the emulator")
    for columns, split_k in itertools.islice(itertools.product((4, 1, 2), (8, 1, 2)), m % 3, None, 5):
        one = case(m=m, n=13, k=424, dtype="fp16" if m % 2 else "bf16")
        config = Config(columns, split_k, 2 if columns < 4 else 1)
        assert check(REGISTRY["matmul"], "cuda.gemv", one, torch.device(where), config=config).refused is None
