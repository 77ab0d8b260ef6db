from typing import Any

import torch
from torch import Tensor

from tilery.base.spec import Bucket, Cost, TensorSpec, case
from tilery.core import inputs as draw
from tilery.core.op import op
from tilery.core.peers import Compiled, baselines, load
from tilery.parts import rows

ALLOWED = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}


def check(dy: TensorSpec, x: TensorSpec) -> None:
    rows.check_rows("x", x, ALLOWED)
    rows.check_rows("dy", dy, ALLOWED)
    rows.check_like("dy", dy, "x", x)


def outputs(dy: TensorSpec, x: TensorSpec) -> tuple[TensorSpec, ...]:
    return (TensorSpec.contiguous(x.shape, x.dtype, x.device),)


def cost(dy: TensorSpec, x: TensorSpec) -> Cost:
    return rows.cost_rows(x, flops=3, reads=2)


def bucket(dy: TensorSpec, x: TensorSpec) -> Bucket:
    return rows.bucket_rows(x)


def inputs(
    m: int, n: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none", batch: int = 0,
    device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    g = draw.generator(seed, device)
    x = rows.draw(m, n, dtype, g, layout, special, batch)
    return {"dy": rows.draw(m, n, dtype, g, "contiguous", "none", batch), "x": x}


def _torch(dy: Tensor, x: Tensor) -> Tensor:
    """In two passes, where autograd makes four."""
    return torch.addcmul(x.new_zeros(()), dy, torch.relu(x), value=2)


def _formula(dy: Tensor, x: Tensor) -> Tensor:
    return dy * 2 * torch.relu(x)


@op(
    check=check, outputs=outputs, cost=cost, bucket=bucket, inputs=inputs, allowed=ALLOWED,
    kernels=("numba", "triton"),
    baselines=baselines(
        torch=_torch, compile=Compiled(_formula),
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
