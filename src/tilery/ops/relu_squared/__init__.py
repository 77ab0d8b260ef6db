from typing import Any

import torch
from torch import Tensor

from tilery.base.spec import Cost, TensorSpec
from tilery.core import inputs as draw
from tilery.core.op import op
from tilery.core.peers import Compiled, baselines, load
from tilery.ops.relu_squared_backward import relu_squared_backward
from tilery.parts import rows

ALLOWED = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}


def check(x: TensorSpec) -> None:
    rows.check_rows("x", x, ALLOWED)


def outputs(x: TensorSpec) -> tuple[TensorSpec, ...]:
    return (TensorSpec.contiguous(x.shape, x.dtype, x.device),)


def cost(x: TensorSpec) -> Cost:
    return rows.cost_rows(x, flops=2)


def inputs(
    m: int, n: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none", batch: int = 0,
    device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    return {"x": rows.draw(m, n, dtype, draw.generator(seed, device), layout, special, batch)}


def _torch(x: Tensor) -> Tensor:
    return torch.relu(x).square()


@op(
    check=check, outputs=outputs, cost=cost, bucket=rows.bucket_rows, inputs=inputs, allowed=ALLOWED,
    kernels=("numba", "triton"),
    baselines=baselines(
        torch=_torch, compile=Compiled(_torch),
        liger=lambda x: load("liger_kernel.ops").LigerReLUSquaredFunction.apply(x),
    ),
    model_sizes=lambda model: [{"n": model.mlp_size}],
    cases={"test": rows.cases(), **rows.bench_cases()},
    backward=lambda args, outs, grads: (relu_squared_backward(grads[0], args[0]),),
)  # fmt: skip
def relu_squared(x: Tensor) -> Tensor:
    """y = max(x, 0)²; x, y [..., N]."""
    return torch.relu(x).square()
