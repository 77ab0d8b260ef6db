"""Cross entropies: what their targets are, what is asked of them, and how they are drawn. Once for all of them."""

from typing import Any

import torch
from torch import Tensor

from tilery.errors import require
from tilery.spec import TensorSpec, dtype_name

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
IGNORED = -100
FEW = 1024  # rows, all of which are read at once, ignored or not, so that none waits for its target
# For cases that test every term of the loss.
TERMS: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 1e-3, "ignored": True}


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


def _require_contiguous(name: str, x: TensorSpec) -> None:
    wanted = TensorSpec.contiguous(x.shape, x.dtype, x.device).strides
    even = all(size <= 1 or have == want for size, have, want in zip(x.shape, x.strides, wanted))
    require(even, f"{name} must be contiguous, got strides {list(x.strides)}; call .contiguous() on it")


def draw_targets(shape: tuple[int, ...], n: int, g: torch.Generator, ignored: bool) -> Tensor:
    """Classes of n; `ignored`: every third is to be ignored. Not where speed is measured: such rows are not read."""
    targets = torch.randint(0, n, shape, generator=g, device=g.device)
    if ignored:
        targets.view(-1)[1::3] = IGNORED
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
    loss = loss.where((targets >= 0) & (targets < n), float("nan"))
    return loss.where(kept, 0.0), lse.where(kept, 0.0)
