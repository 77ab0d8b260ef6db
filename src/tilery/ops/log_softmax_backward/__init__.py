import torch
from torch import Tensor

from tilery.base.spec import Cost, TensorSpec
from tilery.core import inputs as draw
from tilery.core.op import op
from tilery.core.peers import Compiled, baselines
from tilery.ops.softmax_backward import ALLOWED, bucket, check, outputs
from tilery.parts import rows


def cost(dy: TensorSpec, y: TensorSpec) -> Cost:
    return rows.cost_rows(y, flops=4, reads=2)  # add, exp, multiply, subtract


def inputs(
    m: int, n: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none", batch: int = 0,
    device: str = "cuda", seed: int = 0,
) -> dict[str, Tensor]:  # fmt: skip
    g = draw.generator(seed, device)
    return {
        "dy": rows.draw(m, n, dtype, g, layout, special, batch),
        "y": torch.log_softmax(rows.draw(m, n, dtype, g, "contiguous", "none", batch), -1),
    }


def _torch(dy: Tensor, y: Tensor) -> Tensor:
    return torch._log_softmax_backward_data(dy, y, -1, y.dtype)


@op(
    check=check, outputs=outputs, cost=cost, bucket=bucket, inputs=inputs, allowed=ALLOWED,
    kernels=("numba", "triton"),
    baselines=baselines(torch=_torch, compile=Compiled(lambda dy, y: dy - y.exp() * dy.sum(-1, keepdim=True))),
    model_sizes=lambda model: [{"n": model.vocab_size}],
    cases={"test": rows.cases(), **rows.bench_cases()},
)  # fmt: skip
def log_softmax_backward(dy: Tensor, y: Tensor) -> Tensor:
    """Gradient of log_softmax from its result: dx = dy - exp(y) · sum(dy); dy, y, dx [..., N]."""
    return dy - y.exp() * dy.sum(-1, keepdim=True)
