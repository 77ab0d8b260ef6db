from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilery.base.errors import require
from tilery.base.spec import Bucket, Case, Cost, TensorSpec, case
from tilery.core import inputs as draw
from tilery.core.op import op
from tilery.core.peers import Compiled, baselines
from tilery.ops.cross_entropy_backward import cross_entropy_backward
from tilery.parts import rows
from tilery.parts.losses import DTYPES, TERMS, check_scalars, check_targets, draw_targets, look_at_targets, losses

ALLOWED = {torch.float32: 1e-6}  # logits of any dtype are widened


def check(logits: TensorSpec, targets: TensorSpec) -> None:
    rows.check_rows("logits", logits, DTYPES)
    require(logits.shape[-1] >= 1, f"logits must have a class at least, got {list(logits.shape)}")
    check_targets(targets, logits.shape[:-1])


def outputs(logits: TensorSpec, targets: TensorSpec) -> tuple[TensorSpec, ...]:
    return (TensorSpec.contiguous(targets.shape, torch.float32, logits.device),) * 2


def cost(logits: TensorSpec, targets: TensorSpec) -> Cost:
    m, n, _ = rows.rows(logits)
    return Cost(4 * m * n, logits.nbytes + targets.nbytes, 2 * 4 * m)  # max, subtract, exp, sum


def bucket(logits: TensorSpec, targets: TensorSpec) -> Bucket:
    return rows.bucket_rows(logits)


def inputs(
    m: int, n: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none", batch: int = 0,
    label_smoothing: float = 0.0, ignore_index: int = -100, z_loss: float = 0.0, ignored: bool = False,
    outside: bool = False, masked: bool = False, device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """`masked`: the logits of the last row are -inf; `outside`: some targets are no class."""
    g = draw.generator(seed, device)
    logits = rows.draw(m, n, dtype, g, layout, special, batch)
    if masked:
        logits[..., -1, :] = -float("inf")
    targets = draw_targets(logits.shape[:-1], n, g, ignored, ignore_index, outside)
    scalars = {"label_smoothing": label_smoothing, "ignore_index": ignore_index, "z_loss": z_loss}
    return {"logits": logits, "targets": targets, **scalars}


def row_cases() -> list[Case]:
    """What every row-wise op must bear, but for rows without a class; the first of each dtype with all terms."""
    found = [c for c in rows.cases() if c.params["n"]]
    first = {c.params["dtype"]: c for c in reversed(found)}.values()
    more = [
        case(m=8, n=200, dtype="fp32", outside=True),
        case(m=8, n=200, dtype="bf16", outside=True, ignored=True, ignore_index=7),
        case(m=4, n=200, dtype="fp16", ignored=True, ignore_index=2**40, label_smoothing=1.0),
        case(m=5, n=200, dtype="fp32", masked=True, label_smoothing=0.1),  # lse is -inf
        case(m=5, n=200, dtype="bf16", masked=True),
        # Rows wait for their targets: see FEW. In bf16, which is not interpreted: so many programs would take long.
        case(m=1100, n=20, dtype="bf16", ignored=True, outside=True),
    ]
    return [replace(c, params=c.params | TERMS) if any(c is f for f in first) else c for c in found] + more


def bench_cases() -> dict[str, list[Case]]:
    """Vocabularies of Llama 2, Llama 3 and Qwen 3."""
    return {
        "bench": [case(m=m, n=n, dtype="bf16") for m, n in ((8192, 32000), (4096, 128256), (4096, 151936))],
        "bench_cpu": rows.bench_cases()["bench_cpu"],
    }


def _torch(logits: Tensor, targets: Tensor, label_smoothing: float, ignore_index: int, z_loss: float) -> Any:
    """It gives no lse, and answers in the logits' dtype."""
    if z_loss:
        raise NotImplementedError("F.cross_entropy has no z_loss")
    flat, shape = logits.reshape(-1, logits.shape[-1]), targets.shape
    how = {"reduction": "none", "label_smoothing": label_smoothing, "ignore_index": ignore_index}
    return F.cross_entropy(flat, targets.reshape(-1), **how).view(shape), None  # type: ignore[arg-type]


def _formula(logits: Tensor, targets: Tensor, label_smoothing: float, ignore_index: int, z_loss: float) -> Any:
    """For a compiler to fuse."""
    wide, kept = logits.float(), targets != ignore_index
    lse = wide.logsumexp(-1)
    picked = wide.gather(-1, targets.where(kept, 0).unsqueeze(-1)).squeeze(-1)
    loss = lse - (1 - label_smoothing) * picked + z_loss * lse.square()
    if label_smoothing:
        loss = loss - label_smoothing * wide.mean(-1)
    return loss.where(kept, 0.0), lse.where(kept, 0.0)


def _gradients(args: Any, outs: Any, grads: Any) -> Any:
    logits, targets, *scalars = args
    dloss, dlse = (torch.zeros_like(outs[0]) if g is None else g for g in grads)
    return cross_entropy_backward(dloss, dlse, logits, targets, outs[1], *scalars), None, None, None, None


def _first(logits: TensorSpec, targets: TensorSpec) -> str | None:
    """Few short rows: 16 × 1024 takes 1.8 µs in Triton on an H200, 2.2 in CUDA C++."""
    m, n, _ = rows.rows(logits)
    return "triton" if logits.device.type == "cuda" and n <= 8192 and m * n <= 2**19 else None


@op(
    check=check, outputs=outputs, cost=cost, bucket=bucket, inputs=inputs, allowed=ALLOWED,
    runtime=("label_smoothing", "ignore_index", "z_loss"), check_runtime=check_scalars,
    kernels=("cuda", "numba", "triton"), first=_first,
    # Not Liger: it gives no lse, and writes the gradient over its logits as it goes, which is another op.
    baselines=baselines(torch=_torch, compile=Compiled(_formula)),
    model_sizes=lambda model: [{"n": model.vocab_size}],
    indices=lambda logits, targets, s, ignore_index, z: look_at_targets(targets, logits.shape[-1], ignore_index),
    backward=_gradients,
    cases={"test": row_cases(), **bench_cases()},
)  # fmt: skip
def cross_entropy(
    logits: Tensor, targets: Tensor, label_smoothing: float = 0.0, ignore_index: int = -100, z_loss: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Losses of rows, lse - (1 - s) · logits[target] - s · mean(logits) + z_loss · lse²; lse = log(sum(exp(logits))).

    s is label_smoothing, from 0 to 1; z_loss is 0 or more. Both results are 0 where the target is ignore_index. Where
    the target is no class, the loss and the gradient of the row are NaN. lse of a row of -inf alone is -inf.
    logits [..., N]; targets int64, losses and lse fp32 [...].
    """
    n = logits.shape[-1]
    picked = logits.gather(-1, targets.clamp(0, n - 1).unsqueeze(-1)).squeeze(-1)
    scalars = (label_smoothing, ignore_index, z_loss)
    return losses(logits.logsumexp(-1), picked, logits.mean(-1), targets, n, scalars)
