"""Contracts of softmax and softmax_backward."""

from typing import Any

import torch
from torch import Tensor

from tilery.base.spec import Bucket, Case, Cost, TensorSpec, case
from tilery.core import inputs as draw
from tilery.core.call import Call
from tilery.core.op import op
from tilery.core.peers import Compiled, baselines, load
from tilery.ops.rows import contract as rows

ALLOWED = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}


# Backward


def check_backward(call: Call) -> None:
    rows.check_rows("dy", call.dy, ALLOWED)
    rows.check_rows("y", call.y, ALLOWED)
    rows.check_like("dy", call.dy, "y", call.y)


def backward_outputs(call: Call) -> dict[str, TensorSpec]:
    return {"dx": rows.like(call.y)}


def backward_cost(call: Call) -> Cost:
    """softmax: multiply and add, subtract, multiply; log_softmax: add, exp, multiply, subtract."""
    return rows.cost_rows(call.y, flops=4, reads=2)


def backward_bucket(call: Call) -> Bucket:
    return rows.bucket_rows(call.y)


def _backward_inputs(
    m: int, n: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none", batch: int = 0,
    device: str = "cuda", seed: int = 0,
) -> dict[str, Tensor]:  # fmt: skip
    g = draw.generator(seed, device)
    return {
        "dy": rows.draw(m, n, dtype, g, layout, special, batch),
        "y": torch.softmax(rows.draw(m, n, dtype, g, "contiguous", "none", batch), -1),
    }


def _torch_backward(dy: Tensor, y: Tensor) -> Tensor:
    return torch._softmax_backward_data(dy, y, -1, y.dtype)


def _backward_formula(dy: Tensor, y: Tensor) -> Tensor:
    return y * (dy - (dy * y).sum(-1, keepdim=True))


def _liger_backward(dy: Tensor, y: Tensor) -> Any:
    settings = load("liger_kernel.ops.utils").calculate_settings(y.shape[-1])
    return load("liger_kernel.ops.softmax")._softmax_backward(dy, y, *settings, False)


@op(
    check=check_backward, outputs=backward_outputs, cost=backward_cost, bucket=backward_bucket, inputs=_backward_inputs,
    allowed=ALLOWED,
    kernels={"numba": "numba_kernels:softmax_backward", "triton": "triton_kernels:softmax_backward"},
    baselines=baselines(torch=_torch_backward, compile=Compiled(_backward_formula), liger=_liger_backward),
    model_sizes=lambda model: [{"n": model.vocab_size}],
    cases={"test": rows.cases(), **rows.bench_cases()},
)  # fmt: skip
def softmax_backward(dy: Tensor, y: Tensor) -> Tensor:
    """Gradient of softmax from its result: dx = y · (dy - sum(dy · y)); dy, y, dx [..., N]."""
    return y * (dy - (dy * y).sum(-1, keepdim=True))


# Forward


def check(call: Call) -> None:
    rows.check_rows("x", call.x, ALLOWED)


def outputs(call: Call) -> dict[str, TensorSpec]:
    return {"y": rows.like(call.x)}


def cost(call: Call) -> Cost:
    return rows.cost_rows(call.x, flops=5)  # max, subtract, exp, sum, divide


def bucket(call: Call) -> Bucket:
    return rows.bucket_rows(call.x)


def inputs(
    m: int, n: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none", batch: int = 0,
    device: str = "cuda", seed: int = 0,
) -> dict[str, Tensor]:  # fmt: skip
    return {"x": rows.draw(m, n, dtype, draw.generator(seed, device), layout, special, batch)}


def bench_cases() -> dict[str, list[Case]]:
    """Also a vocabulary: few rows of it as a decoder has, and many."""
    known = rows.bench_cases()
    return known | {"bench": [*known["bench"], *(case(m=m, n=128256, dtype="bf16") for m in (16, 1024))]}


def _torch(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


@op(
    check=check, outputs=outputs, cost=cost, bucket=bucket, inputs=inputs, allowed=ALLOWED,
    kernels={
        "numba": "numba_kernels:softmax", "triton": "triton_kernels:softmax", "cutile": "cutile_kernels:softmax",
        "cuda": "cuda_kernels:softmax",
    },
    first=rows.cuda_first(65536, many=65536),
    baselines=baselines(
        torch=_torch, compile=Compiled(_torch),
        liger=lambda x: load("liger_kernel.ops").LigerSoftmaxFunction.apply(x),
        tilegym=lambda x: load("tilegym.ops").softmax(x),
        quack=lambda x: load("quack").softmax(x),
    ),
    model_sizes=lambda model: [{"n": model.vocab_size}],  # what a sampler sees
    backward=lambda call, grads: {"x": softmax_backward(grads.y, call.y)},
    cases={"test": rows.cases(), **bench_cases()},
)  # fmt: skip
def softmax(x: Tensor) -> Tensor:
    """Softmax over the last axis: y = exp(x - max(x)) / sum(exp(x - max(x))); x, y [..., N]."""
    return torch.softmax(x, -1)
