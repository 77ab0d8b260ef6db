"""Contract of dropout, which is its own backward."""

import functools
import math
from typing import Any

import torch
from torch import Tensor

from tilery.base.errors import BadInput
from tilery.base.spec import Bucket, Cost, TensorSpec, case
from tilery.core import inputs as draw
from tilery.core.call import Call
from tilery.core.op import op
from tilery.core.peers import baselines
from tilery.ops.memory import philox
from tilery.ops.memory.call import DropoutCall, factor
from tilery.ops.rows import contract as rows

_ALLOWED = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}


def _check(call: Call) -> None:
    rows.check_rows("x", call.x, _ALLOWED)


def _check_runtime(p: float, seed: int) -> None:
    if not 0 <= p <= 1:  # written so that NaN is refused
        raise BadInput(f"p must be 0 to 1, got {p}")


def _outputs(call: Call) -> dict[str, TensorSpec]:
    return {"y": rows.like(call.x)}


def _cost(call: Call) -> Cost:
    return rows.cost_rows(call.x, flops=1)


def _bucket(call: Call) -> Bucket:
    return rows.bucket_rows(call.x)


def _inputs(
    m: int, n: int, dtype: str = "bf16", p: float = 0.5, layout: str = "contiguous", special: str = "none",
    batch: int = 0, device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """The op's seed has more than 32 bits."""
    x = rows.draw(m, n, dtype, draw.generator(seed, device), layout, special, batch)
    return {"x": x, "p": p, "seed": seed + 2**40 + 2**31}


@functools.lru_cache(maxsize=16)  # they are as large as x
def _kept(shape: tuple[int, ...], p: float, seed: int, device: torch.device) -> Tensor:
    least = torch.tensor(p, dtype=torch.float32).item()  # as kernels have it
    return (philox.uniform(math.prod(shape), seed, device) >= least).view(shape)


def _torch(x: Tensor, p: float, seed: int) -> Tensor:
    """torch's own dropout draws another mask: here it is given ours, so that it only has to multiply."""
    return torch.where(_kept(x.shape, p, seed, x.device), x * factor(p), 0.0)


def _backward(call: Call, grads: Any) -> dict[str, Any]:
    again: Any = dropout  # the same seed gives the same mask
    return {"x": again(grads.y, call.p, call.seed)}


@op(
    check=_check, outputs=_outputs, cost=_cost, bucket=_bucket, inputs=_inputs, allowed=_ALLOWED,
    runtime=("p", "seed"), check_runtime=_check_runtime,
    call_type=DropoutCall, kernels={"numba": "numba_kernels:dropout", "triton": "triton_kernels:dropout"},
    baselines=baselines(torch=_torch),
    model_sizes=lambda model: [{"n": model.hidden_size}],
    cases={
        "test": [
            case(m=3, n=1000, dtype="fp32"),
            case(m=3, n=1000, dtype="bf16", p=0.1),
            case(m=5, n=1000, dtype="fp16", p=0.9),
            case(m=3, n=127, dtype="fp32", p=0.1),
            case(m=1, n=1, dtype="fp32", p=0.0),
            case(m=3, n=100, dtype="fp16", p=1.0),
            case(m=0, n=128, dtype="fp32"),
            case(m=4, n=0, dtype="bf16"),
            case(m=2, n=96, dtype="fp16", batch=3),
            case(m=5, n=256, dtype="fp32", layout="padded"),
            case(m=5, n=257, dtype="fp32", layout="misaligned"),  # rows that start inside of a counter's words
            case(m=5, n=259, dtype="bf16", layout="misaligned"),
            case(m=3, n=72, dtype="fp16", layout="far"),
            case(m=3, n=200, dtype="fp32", special="nan", p=0.0),
            case(m=3, n=200, dtype="fp16", special="inf", p=0.0),
        ],
        **rows.bench_cases(),
    },
    backward=_backward,
)  # fmt: skip
def dropout(x: Tensor, p: float, seed: int) -> Tensor:
    """y = x / (1 - p) where uniform(seed, element) ≥ p, else 0; x, y [..., N]. No state: a seed gives one mask.

    p is from 0 to 1; with 1 all of y is 0.
    """
    return torch.where(_kept(x.shape, p, seed, x.device), x * factor(p), 0.0)
