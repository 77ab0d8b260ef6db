"""Contracts of norms: what they check, how inputs are drawn, which cases they have, what their peers are given."""

import math
from typing import Any

import torch
from torch import Tensor

from tilery.base.errors import BadInput, require
from tilery.base.spec import Case, TensorSpec, case, dtype_name
from tilery.core import inputs as draw
from tilery.core.call import Call
from tilery.ops.rows import contract as rows

# Rounding the result to bf16 alone costs 1.7e-3, to fp16 2.1e-4.
ALLOWED = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}
PER = ("token", "group")  # what shares a scale in fp8

_OFF_GROUPS = {"cuda": "multiples of 16 bytes where groups"}
_ONE_DISTANCE = dict.fromkeys(("cutile", "cuda", "tilelang", "cupy", "numba_cuda"), "lie at two distances")


def check_vector(name: str, vector: TensorSpec, x: TensorSpec) -> None:
    """`vector` must have one value for each column of x, as a weight has."""
    n = x.shape[-1]
    require(vector.shape == (n,), f"{name} must be [{n}] as x's rows are, got {list(vector.shape)}")
    require(vector.stride(0) == 1 or n <= 1, f"{name} must be contiguous, got stride {vector.stride(0)}")
    require(vector.dtype == x.dtype, f"{name} must be {dtype_name(x.dtype)} as x is, got {dtype_name(vector.dtype)}")


def check_residual(call: Call) -> None:
    """The residual must have x's shape and dtype, and evenly spaced rows."""
    rows.check_rows("residual", call.residual, ALLOWED)
    rows.check_like("residual", call.residual, "x", call.x)


def check_eps(eps: float, offset: float = 0.0) -> None:
    """Refuse scalars that are not finite, NaN too. It runs at every call: no message is made until it is needed."""
    if not 0 <= eps < math.inf:
        raise BadInput(f"eps must be 0 or more and finite, got {eps}")
    if not abs(offset) < math.inf:
        raise BadInput(f"offset must be finite, got {offset}")


def draw_rows(m: int, n: int, dtype: str, g: Any, layout: str, special: str, batch: int, heads: int = 0) -> Tensor:
    """Rows as `rows.draw` has them; with heads, [m, heads, n] as q lies in packed qkv: two more heads follow."""
    if not heads:
        return rows.draw(m, n, dtype, g, layout, special, batch)
    return draw.matrix(m, (heads + 2) * n, dtype, g, layout, special).unflatten(1, (heads + 2, n))[:, :heads]


def shifted(weight: Tensor, offset: float) -> Tensor:
    """The weight for peers that know no offset."""
    return weight + offset if offset else weight


def rms_cases(heads: bool = False, refused_by: dict[str, str] | None = None) -> list[Case]:
    """What an RMS norm must bear; `refused_by` holds for the longest row."""
    views = [
        case(m=3, n=64, dtype="fp32", heads=4, refused_by=_ONE_DISTANCE),
        case(m=520, n=16, dtype="fp16", heads=2, refused_by=_ONE_DISTANCE),  # several rows in a program
    ]
    offsets = [case(m=3, n=96, dtype="fp32", offset=1.0), case(m=5, n=256, dtype="fp16", eps=2.0, offset=-0.5)]
    return [*rows.cases(refused_by), *offsets, *eps_cases(), *(views if heads else [])]


def eps_cases() -> list[Case]:
    """Values of eps that change the result, and 0."""
    return [
        case(m=3, n=96, dtype="fp32", eps=0.5),
        case(m=3, n=96, dtype="fp16", eps=0.5),
        case(m=3, n=256, dtype="bf16", eps=0.0),
        case(m=2, n=9000, dtype="fp32", eps=0.5),  # longer than what a few kernels hold at a time
    ]


def backward_cases() -> list[Case]:
    """What a backward must bear: also rows that registers do not hold, and more rows than programs."""
    return [
        case(m=3, n=4096, dtype="fp32"),
        case(m=3, n=4096, dtype="bf16"),
        case(m=5, n=1000, dtype="fp16"),
        case(m=1, n=127, dtype="bf16"),  # one row, masked tail
        case(m=0, n=128, dtype="fp32"),  # the weight's gradient is 0
        case(m=4, n=0, dtype="bf16"),
        case(m=2, n=96, dtype="fp32", batch=3),
        case(m=1100, n=24, dtype="fp32"),  # more rows than programs
        case(m=5, n=256, dtype="fp16", layout="padded"),
        case(m=5, n=257, dtype="bf16", layout="misaligned"),
        case(m=3, n=72, dtype="fp16", layout="far"),  # more than 2**31 elements from first to last
        case(m=3, n=200, dtype="fp32", special="nan"),
        case(m=3, n=200, dtype="fp16", special="inf"),
        case(m=3, n=20001, dtype="fp32"),  # longer than the registers hold
        case(m=3, n=96, dtype="fp32", eps=0.5),
        case(m=3, n=96, dtype="bf16", eps=2.0),
        case(m=3, n=20001, dtype="fp32", eps=0.5),
    ]


def fp8_cases() -> list[Case]:
    """Cases for every way to quantise, for tails of groups, and for what rows must bear.

    In bf16 some values lie on the border between two of fp8, and a few of them fall on the other side: there are so
    many elements that this stays below what is allowed.
    """
    return [
        case(m=3, n=512, dtype="fp32", per="token"),
        case(m=16, n=512, dtype="bf16", per="group"),
        case(m=5, n=1000, dtype="fp16", per="group", scales="column", pow2=True),
        case(m=5, n=1000, dtype="fp32", per="token", pow2=True, offset=1.0),
        case(m=16, n=512, dtype="bf16", per="token", format="e5m2"),
        # a group of one value; several rows in a program
        case(m=520, n=257, dtype="fp32", per="group", format="e5m2", refused_by=_OFF_GROUPS),
        case(m=1, n=1, dtype="fp32", per="group", refused_by=_OFF_GROUPS),
        case(m=0, n=128, dtype="fp32", per="token"),
        case(m=4, n=0, dtype="fp32", per="token"),  # rows of nothing have a scale
        case(m=2, n=192, dtype="fp16", per="group", batch=3),
        case(m=5, n=256, dtype="fp16", per="token", layout="padded"),
        case(m=33, n=257, dtype="bf16", per="group", layout="misaligned", refused_by=_OFF_GROUPS),
        case(m=3, n=72, dtype="fp16", per="token", layout="far"),
        case(m=3, n=200, dtype="fp32", per="group", special="nan", pow2=True),
        case(m=3, n=200, dtype="fp32", per="token", special="inf"),
        case(m=2, n=33000, dtype="fp32", per="token"),  # longer than the registers hold
        case(m=2, n=33000, dtype="fp32", per="group"),
        # per token, eps and offset change the scales: the values of a row are the same up to a factor
        case(m=3, n=512, dtype="fp32", per="token", eps=0.5, offset=-0.5),
        case(m=5, n=512, dtype="fp16", per="group", eps=0.5),
        case(m=2, n=33000, dtype="fp32", per="group", eps=2.0),
    ]


def fp8_bench_cases() -> dict[str, list[Case]]:
    sizes = ((16, 4096), (8192, 4096), (4096, 16384))
    return {
        "bench": [case(m=m, n=n, dtype="bf16", per=per) for per in PER for m, n in sizes],
        "bench_cpu": [case(m=2048, n=4096, dtype="fp32", per=per) for per in PER],
    }
