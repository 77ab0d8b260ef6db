"""Cross entropies: what their targets are, what is asked of them, and how they are drawn. Once for all of them."""

import math
from typing import Any

import torch
from torch import Tensor

from tilery.base.errors import BadInput, require
from tilery.base.spec import TensorSpec, dtype_name
from tilery.core.indices import require_between

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
IGNORED = -100
FEW = 1024  # rows, all of which are read at once, ignored or not, so that none waits for its target
# For cases that test every term of the loss.
TERMS: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 1e-3, "ignored": True}
# Targets that are no class, whatever their low 32 bits are.
OUTSIDE = (-1, 2**32, 2**62, -(2**63), 2**31 - 1)


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


def check_scalars(label_smoothing: float, ignore_index: int, z_loss: float) -> None:
    """At every call, so without a message until it is needed; written so that NaN is refused."""
    if not 0 <= label_smoothing <= 1:
        raise BadInput(f"label_smoothing must be from 0 to 1, got {label_smoothing}")
    if not 0 <= z_loss < math.inf:
        raise BadInput(f"z_loss must be 0 or more and finite, got {z_loss}")


def look_at_targets(targets: Tensor, n: int, ignore_index: int) -> None:
    require_between("targets", targets, 0, n - 1, allow=ignore_index)


def _require_contiguous(name: str, x: TensorSpec) -> None:
    wanted = TensorSpec.contiguous(x.shape, x.dtype, x.device).strides
    even = all(size <= 1 or have == want for size, have, want in zip(x.shape, x.strides, wanted))
    require(even, f"{name} must be contiguous, got strides {list(x.strides)}; call .contiguous() on it")


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


def losses(
    lse: Tensor, picked: Tensor, mean: Tensor, targets: Tensor, n: int, scalars: tuple[float, int, float]
) -> tuple[Tensor, Tensor]:
    """The losses and lse of rows from log(sum(exp(logits))), the target's logit and the mean of n logits."""
    label_smoothing, ignore_index, z_loss = scalars
    loss = lse - (1 - label_smoothing) * picked + z_loss * lse.square()
    if label_smoothing > 0:  # else a logit of -inf would make NaN of it
        loss = loss - label_smoothing * mean
    kept = targets != ignore_index
    loss = loss.where(is_class(targets, n), float("nan"))
    return loss.where(kept, 0.0), lse.where(kept, 0.0)


def is_class(targets: Tensor, n: int) -> Tensor:
    return (targets >= 0) & (targets < n)


def logit_gradients(
    dloss: Tensor, dlse: Tensor, logits: Tensor, targets: Tensor, lse: Tensor, scalars: tuple[float, int, float]
) -> Tensor:
    """Gradients [M, N] of the logits of M rows; the others are [M, 1]."""
    label_smoothing, ignore_index, z_loss = scalars
    n = logits.shape[-1]
    hits = torch.arange(n, device=logits.device) == targets
    grad = (logits - lse).exp() * (dloss * (1 + 2 * z_loss * lse) + dlse)
    grad = grad - dloss * (hits * (1 - label_smoothing) + label_smoothing / n)
    return grad.where(is_class(targets, n), float("nan")).where(targets != ignore_index, 0.0)
