from typing import Any

import torch
from torch import Tensor

from tilery.base.spec import Bucket, Cost, TensorSpec, case
from tilery.core import inputs as draw
from tilery.core.op import op
from tilery.core.peers import Compiled, baselines
from tilery.ops.fused_linear_cross_entropy_backward import fused_linear_cross_entropy_backward
from tilery.parts import rows
from tilery.parts.linear_losses import bucket_projection, cases, check_projection, draw_projection
from tilery.parts.losses import check_scalars, check_targets, draw_targets, look_at_targets, losses

ALLOWED = {torch.float32: 5e-6}  # a logit is a sum of K products


def check(x: TensorSpec, weight: TensorSpec, targets: TensorSpec) -> None:
    check_projection(x, weight)
    check_targets(targets, x.shape[:-1])


def outputs(x: TensorSpec, weight: TensorSpec, targets: TensorSpec) -> tuple[TensorSpec, ...]:
    return (TensorSpec.contiguous(targets.shape, torch.float32, x.device),) * 2


def cost(x: TensorSpec, weight: TensorSpec, targets: TensorSpec) -> Cost:
    m, k, _ = rows.rows(x)
    return Cost(2 * m * weight.shape[0] * k, x.nbytes + weight.nbytes + targets.nbytes, 2 * 4 * m)


def bucket(x: TensorSpec, weight: TensorSpec, targets: TensorSpec) -> Bucket:
    return bucket_projection(x, weight)


def inputs(
    m: int, n: int, k: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none", batch: int = 0,
    label_smoothing: float = 0.0, ignore_index: int = -100, z_loss: float = 0.0, ignored: bool = False,
    outside: bool = False, device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    g = draw.generator(seed, device)
    x, weight = draw_projection(m, n, k, dtype, g, layout, special, batch)
    targets = draw_targets(x.shape[:-1], n, g, ignored, ignore_index, outside)
    scalars = {"label_smoothing": label_smoothing, "ignore_index": ignore_index, "z_loss": z_loss}
    return {"x": x, "weight": weight, "targets": targets, **scalars}


def _torch(x: Tensor, weight: Tensor, targets: Tensor, label_smoothing: float, ignore_index: int, z_loss: float) -> Any:
    """Logits in fp32, as ours are: rounded ones miss the losses by 1e-4."""
    narrow = x.is_cuda and x.dtype != torch.float32
    flat, kept = x.flatten(0, -2), targets != ignore_index
    wide = torch.mm(flat, weight.t(), out_dtype=torch.float32) if narrow else flat @ weight.t()
    wide = wide.view(*x.shape[:-1], -1)
    lse = wide.logsumexp(-1)
    picked = wide.gather(-1, targets.where(kept, 0).unsqueeze(-1)).squeeze(-1)
    loss = lse - (1 - label_smoothing) * picked + z_loss * lse.square()
    if label_smoothing:
        loss = loss - label_smoothing * wide.mean(-1)
    return loss.where(kept, 0.0), lse.where(kept, 0.0)


def _gradients(args: Any, outs: Any, grads: Any) -> Any:
    x, weight, targets, *scalars = args
    dloss, dlse = (torch.zeros_like(outs[0]) if g is None else g for g in grads)
    dx, dweight = fused_linear_cross_entropy_backward(dloss, dlse, x, weight, targets, outs[1], *scalars)
    return dx, dweight, None, None, None, None


@op(
    check=check, outputs=outputs, cost=cost, bucket=bucket, inputs=inputs, allowed=ALLOWED,
    runtime=("label_smoothing", "ignore_index", "z_loss"), check_runtime=check_scalars,
    kernels=("numba", "triton"),
    baselines=baselines(torch=_torch, compile=Compiled(_torch)),
    model_sizes=lambda model: [{"n": model.vocab_size, "k": model.hidden_size}],
    indices=lambda x, weight, targets, s, ignore_index, z: look_at_targets(targets, weight.shape[0], ignore_index),
    backward=_gradients,
    cases={
        "test": cases(),
        "bench": [case(m=m, n=128256, k=4096, dtype="bf16") for m in (1024, 4096)],
        "bench_cpu": [case(m=256, n=4096, k=512, dtype="fp32")],
    },
)  # fmt: skip
def fused_linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, label_smoothing: float = 0.0, ignore_index: int = -100,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """cross_entropy of logits = x · weightᵀ that are never stored, nor rounded: its losses and lse, its scalars.

    x [..., K], weight [N, K]; targets, losses and lse [...].
    """
    n = weight.shape[0]
    logits = x @ weight.t()
    picked = logits.gather(-1, targets.clamp(0, n - 1).unsqueeze(-1)).squeeze(-1)
    scalars = (label_smoothing, ignore_index, z_loss)
    return losses(logits.logsumexp(-1), picked, logits.mean(-1), targets, n, scalars)
