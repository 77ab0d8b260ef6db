from typing import Any

import torch
from torch import Tensor

from tilery.base.spec import Bucket, Cost, TensorSpec, case
from tilery.core import inputs as draw
from tilery.core.op import op
from tilery.core.peers import Compiled, baselines
from tilery.parts import rows
from tilery.parts.linear_losses import bucket_projection, cases, check_projection, draw_projection
from tilery.parts.losses import (
    check_scalars,
    check_targets,
    check_values,
    draw_targets,
    logit_gradients,
    look_at_targets,
)

# The gradients of the logits are rounded to the dtype of x before they are multiplied, and the products once more.
ALLOWED = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def check(
    dloss: TensorSpec, dlse: TensorSpec, x: TensorSpec, weight: TensorSpec, targets: TensorSpec, lse: TensorSpec
) -> None:
    check_projection(x, weight)
    check_targets(targets, x.shape[:-1])
    check_values(targets, dloss=dloss, dlse=dlse, lse=lse)


def outputs(
    dloss: TensorSpec, dlse: TensorSpec, x: TensorSpec, weight: TensorSpec, targets: TensorSpec, lse: TensorSpec
) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec.contiguous(t.shape, t.dtype, t.device) for t in (x, weight))


def cost(
    dloss: TensorSpec, dlse: TensorSpec, x: TensorSpec, weight: TensorSpec, targets: TensorSpec, lse: TensorSpec
) -> Cost:
    m, k, _ = rows.rows(x)
    both = x.nbytes + weight.nbytes
    return Cost(6 * m * weight.shape[0] * k, both + targets.nbytes + 3 * lse.nbytes, both)


def bucket(
    dloss: TensorSpec, dlse: TensorSpec, x: TensorSpec, weight: TensorSpec, targets: TensorSpec, lse: TensorSpec
) -> Bucket:
    return bucket_projection(x, weight)


def inputs(
    m: int, n: int, k: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none", batch: int = 0,
    label_smoothing: float = 0.0, ignore_index: int = -100, z_loss: float = 0.0, ignored: bool = False,
    outside: bool = False, device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    g = draw.generator(seed, device)
    x, weight = draw_projection(m, n, k, dtype, g, layout, special, batch)
    shape = x.shape[:-1]
    dloss, dlse = (draw.away_from_zero(shape, g) for _ in range(2))
    return {
        "dloss": dloss, "dlse": dlse, "x": x, "weight": weight,
        "targets": draw_targets(shape, n, g, ignored, ignore_index, outside),
        "lse": (x.float() @ weight.float().t()).logsumexp(-1),
        "label_smoothing": label_smoothing, "ignore_index": ignore_index, "z_loss": z_loss,
    }  # fmt: skip


def _torch(
    dloss: Tensor, dlse: Tensor, x: Tensor, weight: Tensor, targets: Tensor, lse: Tensor, label_smoothing: float,
    ignore_index: int, z_loss: float,
) -> Any:  # fmt: skip
    logits = (x @ weight.t()).flatten(0, -2)
    dloss, dlse, lse, wanted = (t.reshape(-1, 1) for t in (dloss, dlse, lse, targets))
    hits = torch.arange(logits.shape[-1], device=x.device) == wanted
    grad = (logits.float() - lse).exp() * (dloss * (1 + 2 * z_loss * lse) + dlse)
    grad = grad - dloss * (hits * (1 - label_smoothing) + label_smoothing / logits.shape[-1])
    grad = grad.where(wanted != ignore_index, 0.0).to(x.dtype)
    return (grad @ weight).view(x.shape), grad.t() @ x.flatten(0, -2)


@op(
    check=check, outputs=outputs, cost=cost, bucket=bucket, inputs=inputs, allowed=ALLOWED, rounds_between=True,
    runtime=("label_smoothing", "ignore_index", "z_loss"), check_runtime=check_scalars,
    kernels=("numba", "triton"),
    baselines=baselines(torch=_torch, compile=Compiled(_torch)),
    model_sizes=lambda model: [{"n": model.vocab_size, "k": model.hidden_size}],
    indices=lambda dloss, dlse, x, weight, targets, lse, s, ignore_index, z: look_at_targets(
        targets, weight.shape[0], ignore_index
    ),
    cases={
        "test": cases(),
        "bench": [case(m=m, n=128256, k=4096, dtype="bf16") for m in (1024, 4096)],
        "bench_cpu": [case(m=256, n=4096, k=512, dtype="fp32"), case(m=256, n=4096, k=512, dtype="bf16")],
    },
)  # fmt: skip
def fused_linear_cross_entropy_backward(
    dloss: Tensor, dlse: Tensor, x: Tensor, weight: Tensor, targets: Tensor, lse: Tensor,
    label_smoothing: float = 0.0, ignore_index: int = -100, z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of fused_linear_cross_entropy: dx = g · weight, dweight = gᵀ · x, g as of cross_entropy_backward.

    A target that is no class makes NaN of its row of dx, and of all of dweight, to which every row adds.
    x and dx [..., K], weight and dweight [N, K], the others [...].
    """
    rows_of_x = x.reshape(-1, x.shape[-1])
    dloss, dlse, lse, targets = (t.reshape(-1, 1) for t in (dloss, dlse, lse, targets))
    scalars = (label_smoothing, ignore_index, z_loss)
    grad = logit_gradients(dloss, dlse, rows_of_x @ weight.t(), targets, lse, scalars).to(x.dtype)
    return (grad @ weight).reshape(x.shape), grad.t() @ rows_of_x
