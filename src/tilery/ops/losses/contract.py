"""What the contracts of cross entropies share: checks of targets and scalars, formulas, how targets are drawn."""

import math
from typing import Any

import torch
from torch import Tensor

from tilery.base.errors import BadInput, require
from tilery.base.spec import Bucket, Case, TensorSpec, case, dtype_name
from tilery.core import inputs
from tilery.core.call import Call
from tilery.core.indices import require_between
from tilery.ops.losses.call import LinearLossCall, LossCall
from tilery.ops.rows import contract as rows

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
IGNORED = -100
# For cases that test every term of the loss.
TERMS: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 1e-3, "ignored": True}
# Targets that are no class, whatever their low 32 bits are.
OUTSIDE = (-1, 2**32, 2**62, -(2**63), 2**31 - 1)


# Checks


def check_logits(logits: TensorSpec) -> None:
    rows.check_rows("logits", logits, DTYPES)
    require(logits.shape[-1] >= 1, f"logits must have a class at least, got {list(logits.shape)}")


def check_targets(targets: TensorSpec, shape: tuple[int, ...]) -> None:
    require(targets.dtype == torch.int64, f"targets must be int64, got {dtype_name(targets.dtype)}")
    require(
        tuple(targets.shape) == tuple(shape),
        f"targets must be {list(shape)}, one for every row, got {list(targets.shape)}",
    )
    _require_contiguous("targets", targets)


def check_values(targets: TensorSpec, **values: TensorSpec) -> None:
    """One fp32 value for every target."""
    for name, x in values.items():
        require(x.dtype == torch.float32, f"{name} must be fp32, got {dtype_name(x.dtype)}")
        require(x.shape == targets.shape, f"{name} must be {list(targets.shape)} as targets is, got {list(x.shape)}")
        _require_contiguous(name, x)


def check_projection(x: TensorSpec, weight: TensorSpec) -> None:
    rows.check_rows("x", x, DTYPES)
    k = x.shape[-1]
    require(
        len(weight.shape) == 2 and weight.shape[1] == k and weight.shape[0] >= 1,
        f"weight must be [N, {k}] as x's rows are, with N at least 1, got {list(weight.shape)}",
    )
    require(k >= 1, f"x must have a column at least, got {list(x.shape)}")
    require(
        weight.stride(1) == 1 or k == 1,
        f"weight must have stride 1 along its last dimension, got strides {list(weight.strides)}; "
        "call .contiguous() on it",
    )
    require(weight.dtype == x.dtype, f"weight must be {dtype_name(x.dtype)} as x is, got {dtype_name(weight.dtype)}")


def check_scalars(label_smoothing: float, ignore_index: int, z_loss: float) -> None:
    """At every call, so without a message until it is needed; written so that NaN is refused."""
    if not 0 <= label_smoothing <= 1:
        raise BadInput(f"label_smoothing must be from 0 to 1, got {label_smoothing}")
    if not 0 <= z_loss < math.inf:
        raise BadInput(f"z_loss must be 0 or more and finite, got {z_loss}")


def check_indices(call: LossCall) -> None:
    """Every target must be a class or ignored."""
    require_between("targets", call.targets, 0, call.n - 1, allow=call.ignore_index)


def _require_contiguous(name: str, x: TensorSpec) -> None:
    wanted = TensorSpec.contiguous(x.shape, x.dtype, x.device).strides
    even = all(size <= 1 or have == want for size, have, want in zip(x.shape, x.strides, wanted))
    require(even, f"{name} must be contiguous, got strides {list(x.strides)}; call .contiguous() on it")


# Results and gradients


def outputs(call: LossCall) -> dict[str, TensorSpec]:
    """One loss and one lse for every target."""
    each = TensorSpec.contiguous(call.targets.shape, torch.float32, call.targets.device)
    return {"loss": each, "lse": each}


def output_gradients(call: LossCall, grads: Call) -> tuple[Tensor, Tensor]:
    """Gradients of loss and lse: zeros where autograd has none."""
    dloss, dlse = (torch.zeros_like(call.loss) if g is None else g for g in (grads.loss, grads.lse))
    return dloss, dlse


def linear_bucket(call: LinearLossCall) -> Bucket:
    return Bucket(exact=f"n={call.n},k={call.k},{dtype_name(call.x.dtype)}", scaled={"m": call.m})


# Formulas of the references


def losses(
    lse: Tensor, target_logit: Tensor, mean: Tensor, targets: Tensor, n: int, scalars: tuple[float, int, float]
) -> tuple[Tensor, Tensor]:
    """Losses and lse of rows from log(sum(exp(logits))), the target's logit and the mean of n logits."""
    label_smoothing, ignore_index, z_loss = scalars
    loss = lse - (1 - label_smoothing) * target_logit + z_loss * lse.square()
    if label_smoothing > 0:  # else a logit of -inf would make NaN of it
        loss = loss - label_smoothing * mean
    kept = targets != ignore_index
    loss = loss.where(_is_class(targets, n), float("nan"))
    return loss.where(kept, 0.0), lse.where(kept, 0.0)


def logit_gradients(
    dloss: Tensor, dlse: Tensor, logits: Tensor, targets: Tensor, lse: Tensor, scalars: tuple[float, int, float]
) -> Tensor:
    """Gradients [M, N] of the logits of M rows; the other tensors are [M, 1]."""
    label_smoothing, ignore_index, z_loss = scalars
    n = logits.shape[-1]
    is_target = torch.arange(n, device=logits.device) == targets
    grad = (logits - lse).exp() * (dloss * (1 + 2 * z_loss * lse) + dlse)
    grad = grad - dloss * (is_target * (1 - label_smoothing) + label_smoothing / n)
    return grad.where(_is_class(targets, n), float("nan")).where(targets != ignore_index, 0.0)


def _is_class(targets: Tensor, n: int) -> Tensor:
    return (targets >= 0) & (targets < n)


# Cases


def draw_targets(
    shape: tuple[int, ...], n: int, g: torch.Generator, ignored: bool, ignore_index: int = IGNORED,
    outside: bool = False,
) -> Tensor:  # fmt: skip
    """Classes of n; `ignored`: every third is to be ignored. Not where speed is measured: such rows are not read.

    `outside`: n and the integers of OUTSIDE come first.
    """
    targets = torch.randint(0, n, shape, generator=g, device=g.device)
    flat = targets.view(-1)
    if outside:
        wrong = torch.tensor((n, *OUTSIDE), device=g.device)[: len(flat)]
        flat[: len(wrong)] = wrong
    if ignored:
        flat[1::3] = ignore_index
    return targets


def draw_projection(
    m: int, n: int, k: int, dtype: str, g: torch.Generator, layout: str, special: str, batch: int
) -> tuple[Tensor, Tensor]:
    """x and a weight; the logits are about normal."""
    x = rows.draw(m, k, dtype, g, layout, special, batch)
    return x, inputs.matrix(n, k, dtype, g) * k**-0.5


def linear_cases() -> list[Case]:
    return [
        case(m=7, n=70, k=40, dtype="fp32", **TERMS),
        case(m=7, n=70, k=40, dtype="fp16", **TERMS),
        case(m=7, n=70, k=40, dtype="bf16", **TERMS),
        case(m=5, n=300, k=72, dtype="fp32"),
        case(m=130, n=140, k=33, dtype="fp16"),  # several tiles each way, odd tails
        case(m=130, n=140, k=33, dtype="bf16"),
        case(m=1, n=1, k=1, dtype="fp32"),
        case(m=0, n=64, k=32, dtype="fp32"),  # nothing to launch
        case(m=2, n=96, k=64, dtype="fp32", batch=3, **TERMS),  # [batch, m, k]
        case(m=5, n=64, k=64, dtype="fp16", layout="padded"),
        case(m=5, n=64, k=64, dtype="fp32", layout="misaligned"),
        case(m=3, n=64, k=32, dtype="fp16", layout="far"),  # more than 2**31 elements from first to last
        case(m=7, n=64, k=32, dtype="fp32", special="nan"),
        case(m=8, n=70, k=32, dtype="fp32", outside=True),
        case(m=8, n=70, k=32, dtype="fp16", ignored=True, ignore_index=2**40, label_smoothing=1.0),
        case(m=8, n=70, k=32, dtype="bf16", outside=True, ignored=True, ignore_index=7),
    ]


# Peers


def fused_formula(
    logits: Tensor, targets: Tensor, label_smoothing: float, ignore_index: int, z_loss: float
) -> tuple[Tensor, Tensor]:
    """Losses and lse of fp32 logits, written for a compiler to fuse."""
    kept, lse = targets != ignore_index, logits.logsumexp(-1)
    target_logit = logits.gather(-1, targets.where(kept, 0).unsqueeze(-1)).squeeze(-1)
    loss = lse - (1 - label_smoothing) * target_logit + z_loss * lse.square()
    if label_smoothing:
        loss = loss - label_smoothing * logits.mean(-1)
    return loss.where(kept, 0.0), lse.where(kept, 0.0)
