"""Contracts of log_softmax and log_softmax_backward."""

import torch
from torch import Tensor

from tilery.core import inputs as draw
from tilery.core.op import op
from tilery.core.peers import Compiled, baselines
from tilery.ops.rows import contract as rows
from tilery.ops.softmax import softmax as plain


def _backward_inputs(
    m: int, n: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none", batch: int = 0,
    device: str = "cuda", seed: int = 0,
) -> dict[str, Tensor]:  # fmt: skip
    g = draw.generator(seed, device)
    return {
        "dy": rows.draw(m, n, dtype, g, layout, special, batch),
        "y": torch.log_softmax(rows.draw(m, n, dtype, g, "contiguous", "none", batch), -1),
    }


def _torch_backward(dy: Tensor, y: Tensor) -> Tensor:
    return torch._log_softmax_backward_data(dy, y, -1, y.dtype)


@op(
    check=plain.check_backward, outputs=plain.backward_outputs, cost=plain.backward_cost, bucket=plain.backward_bucket,
    inputs=_backward_inputs, allowed=plain.ALLOWED,
    kernels={"numba": "numba_kernels:log_softmax_backward", "triton": "triton_kernels:log_softmax_backward"},
    baselines=baselines(torch=_torch_backward, compile=Compiled(lambda dy, y: dy - y.exp() * dy.sum(-1, keepdim=True))),
    model_sizes=lambda model: [{"n": model.vocab_size}],
    cases={"test": rows.cases(), **rows.bench_cases()},
)  # fmt: skip
def log_softmax_backward(dy: Tensor, y: Tensor) -> Tensor:
    """Gradient of log_softmax from its result: dx = dy - exp(y) · sum(dy); dy, y, dx [..., N]."""
    return dy - y.exp() * dy.sum(-1, keepdim=True)


def _torch(x: Tensor) -> Tensor:
    return torch.log_softmax(x, -1)


@op(
    check=plain.check, outputs=plain.outputs, cost=plain.cost, bucket=plain.bucket, inputs=plain.inputs,
    allowed=plain.ALLOWED,
    kernels={"numba": "numba_kernels:log_softmax", "triton": "triton_kernels:log_softmax"},
    baselines=baselines(torch=_torch, compile=Compiled(_torch)),
    model_sizes=lambda model: [{"n": model.vocab_size}],
    backward=lambda call, grads: {"x": log_softmax_backward(grads.y, call.y)},
    cases={"test": rows.cases(), **plain.bench_cases()},
)  # fmt: skip
def log_softmax(x: Tensor) -> Tensor:
    """Logarithm of softmax over the last axis: y = x - max(x) - log(sum(exp(x - max(x)))); x, y [..., N]."""
    return torch.log_softmax(x, -1)
