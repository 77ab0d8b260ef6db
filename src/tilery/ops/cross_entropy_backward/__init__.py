from typing import Any

import torch
from torch import Tensor

from tilery.base.errors import require
from tilery.base.spec import Bucket, Cost, TensorSpec, case
from tilery.core import inputs as draw
from tilery.core.op import op
from tilery.core.peers import Compiled, baselines
from tilery.parts import rows
from tilery.parts.losses import (
    DTYPES,
    TERMS,
    check_scalars,
    check_targets,
    check_values,
    draw_targets,
    logit_gradients,
    look_at_targets,
)

ALLOWED = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}


def check(dloss: TensorSpec, dlse: TensorSpec, logits: TensorSpec, targets: TensorSpec, lse: TensorSpec) -> None:
    rows.check_rows("logits", logits, DTYPES)
    require(logits.shape[-1] >= 1, f"logits must have a class at least, got {list(logits.shape)}")
    check_targets(targets, logits.shape[:-1])
    check_values(targets, dloss=dloss, dlse=dlse, lse=lse)


def outputs(
    dloss: TensorSpec, dlse: TensorSpec, logits: TensorSpec, targets: TensorSpec, lse: TensorSpec
) -> tuple[TensorSpec, ...]:
    return (TensorSpec.contiguous(logits.shape, logits.dtype, logits.device),)


def cost(dloss: TensorSpec, dlse: TensorSpec, logits: TensorSpec, targets: TensorSpec, lse: TensorSpec) -> Cost:
    return rows.cost_rows(logits, flops=4, extra=targets.nbytes + 3 * lse.nbytes)  # subtract, exp, multiply, subtract


def bucket(dloss: TensorSpec, dlse: TensorSpec, logits: TensorSpec, targets: TensorSpec, lse: TensorSpec) -> Bucket:
    return rows.bucket_rows(logits)


def inputs(
    m: int, n: int, dtype: str = "bf16", layout: str = "contiguous", batch: int = 0,
    label_smoothing: float = 0.0, ignore_index: int = -100, z_loss: float = 0.0, ignored: bool = False,
    outside: bool = False, device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    g = draw.generator(seed, device)
    logits = rows.draw(m, n, dtype, g, layout, "none", batch)
    shape = logits.shape[:-1]
    dloss, dlse = (draw.away_from_zero(shape, g) for _ in range(2))
    return {
        "dloss": dloss, "dlse": dlse, "logits": logits, "lse": logits.float().logsumexp(-1),
        "targets": draw_targets(shape, n, g, ignored, ignore_index, outside),
        "label_smoothing": label_smoothing, "ignore_index": ignore_index, "z_loss": z_loss,
    }  # fmt: skip


def _torch(
    dloss: Tensor, dlse: Tensor, logits: Tensor, targets: Tensor, lse: Tensor, label_smoothing: float,
    ignore_index: int, z_loss: float,
) -> Tensor:  # fmt: skip
    """torch's own softmax, then in place: the backward of its cross_entropy knows neither dlse nor z_loss."""
    kept, n = targets != ignore_index, logits.shape[-1]
    dloss, dlse = dloss.where(kept, 0.0), dlse.where(kept, 0.0)
    scale = dloss * (1 + 2 * z_loss * lse) + dlse
    grad = torch.softmax(logits, -1).mul_(scale.unsqueeze(-1))
    if label_smoothing:
        grad.sub_((dloss * (label_smoothing / n)).unsqueeze(-1))
    hit = (dloss * (label_smoothing - 1)).to(grad.dtype).unsqueeze(-1)
    return grad.scatter_add_(-1, targets.where(kept, 0).unsqueeze(-1), hit)


def _formula(
    dloss: Tensor, dlse: Tensor, logits: Tensor, targets: Tensor, lse: Tensor, label_smoothing: float,
    ignore_index: int, z_loss: float,
) -> Tensor:  # fmt: skip
    kept = (targets != ignore_index).unsqueeze(-1)
    dloss, dlse, lse = dloss.unsqueeze(-1), dlse.unsqueeze(-1), lse.unsqueeze(-1)
    grad = (logits.float() - lse).exp() * (
        dloss * (1 + 2 * z_loss * lse) + dlse
    ) - dloss * label_smoothing / logits.shape[-1]
    classes = torch.arange(logits.shape[-1], device=logits.device)
    grad = grad - (classes == targets.unsqueeze(-1)) * (dloss * (1 - label_smoothing))
    return grad.where(kept, 0.0).to(logits.dtype)


def _cases() -> list[Any]:
    """As of the forward, but without NaN and infinities: lse holds what they make of a row."""
    found = [c for c in rows.cases() if c.params["n"] and "special" not in c.params]
    more = [
        case(m=8, n=200, dtype="fp32", outside=True, label_smoothing=1.0),
        case(m=8, n=200, dtype="bf16", outside=True, ignored=True, ignore_index=7),
        case(m=4, n=200, dtype="fp16", ignored=True, ignore_index=2**40),
    ]
    return [case(**(c.params | TERMS)) if i % 2 == 0 else c for i, c in enumerate(found)] + more


@op(
    check=check, outputs=outputs, cost=cost, bucket=bucket, inputs=inputs, allowed=ALLOWED,
    runtime=("label_smoothing", "ignore_index", "z_loss"), check_runtime=check_scalars,
    kernels=("numba", "triton"),
    baselines=baselines(torch=_torch, compile=Compiled(_formula)),
    model_sizes=lambda model: [{"n": model.vocab_size}],
    indices=lambda dloss, dlse, logits, targets, lse, s, ignore_index, z: look_at_targets(
        targets, logits.shape[-1], ignore_index
    ),
    cases={
        "test": _cases(),
        "bench": [case(m=m, n=n, dtype="bf16") for m, n in ((8192, 32000), (4096, 128256))],
        "bench_cpu": rows.bench_cases()["bench_cpu"],
    },
)  # fmt: skip
def cross_entropy_backward(
    dloss: Tensor, dlse: Tensor, logits: Tensor, targets: Tensor, lse: Tensor, label_smoothing: float = 0.0,
    ignore_index: int = -100, z_loss: float = 0.0,
) -> Tensor:  # fmt: skip
    """Gradient of cross_entropy: p · (dloss · (1 + 2 · z_loss · lse) + dlse) - dloss · ((1 - s) · [target] + s / N).

    p = exp(logits - lse), s = label_smoothing; rows to ignore get 0, and rows whose target is no class get NaN.
    logits and the result [..., N], the others [...].
    """
    dloss, dlse, lse, targets = (t.unsqueeze(-1) for t in (dloss, dlse, lse, targets))
    return logit_gradients(dloss, dlse, logits, targets, lse, (label_smoothing, ignore_index, z_loss))
