from typing import Any

import torch
from torch import Tensor

from tilery.base.spec import Bucket, Cost, TensorSpec
from tilery.core import inputs as draw
from tilery.core.op import op
from tilery.core.peers import Compiled, baselines, load
from tilery.parts import rows

ALLOWED = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}


def check(dy: TensorSpec, y: TensorSpec) -> None:
    rows.check_rows("dy", dy, ALLOWED)
    rows.check_rows("y", y, ALLOWED)
    rows.check_like("dy", dy, "y", y)


def outputs(dy: TensorSpec, y: TensorSpec) -> tuple[TensorSpec, ...]:
    return (TensorSpec.contiguous(y.shape, y.dtype, y.device),)


def cost(dy: TensorSpec, y: TensorSpec) -> Cost:
    return rows.cost_rows(y, flops=4, reads=2)  # multiply and add, subtract, multiply


def bucket(dy: TensorSpec, y: TensorSpec) -> Bucket:
    return rows.bucket_rows(y)


def inputs(
    m: int, n: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none", batch: int = 0,
    device: str = "cuda", seed: int = 0,
) -> dict[str, Tensor]:  # fmt: skip
    g = draw.generator(seed, device)
    return {
        "dy": rows.draw(m, n, dtype, g, layout, special, batch),
        "y": torch.softmax(rows.draw(m, n, dtype, g, "contiguous", "none", batch), -1),
    }


def _torch(dy: Tensor, y: Tensor) -> Tensor:
    return torch._softmax_backward_data(dy, y, -1, y.dtype)


def _plain(dy: Tensor, y: Tensor) -> Tensor:
    return y * (dy - (dy * y).sum(-1, keepdim=True))


def _liger(dy: Tensor, y: Tensor) -> Any:
    settings = load("liger_kernel.ops.utils").calculate_settings(y.shape[-1])
    return load("liger_kernel.ops.softmax")._softmax_backward(dy, y, *settings, False)


@op(
    check=check, outputs=outputs, cost=cost, bucket=bucket, inputs=inputs, allowed=ALLOWED,
    kernels=("numba", "triton"),
    baselines=baselines(torch=_torch, compile=Compiled(_plain), liger=_liger),
    model_sizes=lambda model: [{"n": model.vocab_size}],
    cases={"test": rows.cases(), **rows.bench_cases()},
)  # fmt: skip
def softmax_backward(dy: Tensor, y: Tensor) -> Tensor:
    """Gradient of softmax from its result: dx = y · (dy - sum(dy · y)); dy, y, dx [..., N]."""
    return y * (dy - (dy * y).sum(-1, keepdim=True))
