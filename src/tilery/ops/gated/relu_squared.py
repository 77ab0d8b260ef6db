"""Contracts of relu_squared and relu_squared_backward."""

from typing import Any

import torch
from torch import Tensor

from tilery.base.spec import Bucket, Cost, TensorSpec, case
from tilery.core import inputs as draw
from tilery.core.call import Call
from tilery.core.op import op
from tilery.core.peers import Compiled, baselines, load
from tilery.ops.rows import contract as rows

ALLOWED = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}


# Backward


def _check_backward(call: Call) -> None:
    rows.check_rows("x", call.x, ALLOWED)
    rows.check_rows("dy", call.dy, ALLOWED)
    rows.check_like("dy", call.dy, "x", call.x)


def _backward_outputs(call: Call) -> dict[str, TensorSpec]:
    return {"dx": rows.like(call.x)}


def _backward_cost(call: Call) -> Cost:
    return rows.cost_rows(call.x, flops=3, reads=2)


def _bucket(call: Call) -> Bucket:
    return rows.bucket_rows(call.x)


def _backward_inputs(
    m: int, n: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none", batch: int = 0,
    device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    g = draw.generator(seed, device)
    x = rows.draw(m, n, dtype, g, layout, special, batch)
    return {"dy": rows.draw(m, n, dtype, g, "contiguous", "none", batch), "x": x}


def _torch_backward(dy: Tensor, x: Tensor) -> Tensor:
    """In two passes, where autograd makes four."""
    return torch.addcmul(x.new_zeros(()), dy, torch.relu(x), value=2)


def _backward_formula(dy: Tensor, x: Tensor) -> Tensor:
    return dy * 2 * torch.relu(x)


@op(
    check=_check_backward, outputs=_backward_outputs, cost=_backward_cost, bucket=_bucket, inputs=_backward_inputs,
    allowed=ALLOWED,
    kernels={"numba": "numba_kernels:relu_squared_backward", "triton": "triton_kernels:relu_squared_backward"},
    baselines=baselines(
        torch=_torch_backward, compile=Compiled(_backward_formula),
        liger=lambda dy, x: load("liger_kernel.ops").relu_squared_backward(x, dy),
    ),
    model_sizes=lambda model: [{"n": model.mlp_size}],
    cases={
        "test": [
            case(m=3, n=4096, dtype="fp32"),
            case(m=3, n=127, dtype="bf16"),
            case(m=5, n=1000, dtype="fp16"),
            case(m=0, n=128, dtype="fp32"),
            case(m=2, n=96, dtype="fp32", batch=3),
            case(m=5, n=257, dtype="bf16", layout="misaligned"),
            case(m=3, n=72, dtype="fp16", layout="far"),
            case(m=3, n=200, dtype="fp32", special="nan"),
            case(m=3, n=200, dtype="fp16", special="inf"),
        ],
        **rows.bench_cases(),
    },
)  # fmt: skip
def relu_squared_backward(dy: Tensor, x: Tensor) -> Tensor:
    """Gradient of relu_squared: dx = 2 · dy · max(x, 0); all [..., N]."""
    return 2 * dy * torch.relu(x)


# Forward


def _check(call: Call) -> None:
    rows.check_rows("x", call.x, ALLOWED)


def _outputs(call: Call) -> dict[str, TensorSpec]:
    return {"y": rows.like(call.x)}


def _cost(call: Call) -> Cost:
    return rows.cost_rows(call.x, flops=2)


def _inputs(
    m: int, n: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none", batch: int = 0,
    device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    return {"x": rows.draw(m, n, dtype, draw.generator(seed, device), layout, special, batch)}


def _torch(x: Tensor) -> Tensor:
    return torch.relu(x).square()


@op(
    check=_check, outputs=_outputs, cost=_cost, bucket=_bucket, inputs=_inputs, allowed=ALLOWED,
    kernels={"numba": "numba_kernels:relu_squared", "triton": "triton_kernels:relu_squared"},
    baselines=baselines(
        torch=_torch, compile=Compiled(_torch),
        liger=lambda x: load("liger_kernel.ops").LigerReLUSquaredFunction.apply(x),
    ),
    model_sizes=lambda model: [{"n": model.mlp_size}],
    cases={"test": rows.cases(), **rows.bench_cases()},
    backward=lambda call, grads: {"x": relu_squared_backward(grads.y, call.x)},
)  # fmt: skip
def relu_squared(x: Tensor) -> Tensor:
    """y = max(x, 0)²; x, y [..., N]."""
    return torch.relu(x).square()
