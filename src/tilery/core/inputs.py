"""Random tensors for checks and timings, laid out as users lay them out. Never zeros."""

from typing import Any

import torch
from torch import Tensor

from tilery.base.errors import BadInput
from tilery.base.spec import DTYPES

# How a matrix may lie in memory. `far` puts its rows more than 2**31 elements apart: memory that is never
# touched, so never committed on a CPU.
LAYOUTS = ("contiguous", "padded", "misaligned", "far", "transposed")
SPECIALS = {"none": 0.0, "nan": float("nan"), "inf": float("inf"), "-inf": -float("inf")}


def dtype_of(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise BadInput(f"dtype must be one of {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]


def generator(seed: int, device: Any) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def matrix(
    rows: int, columns: int, dtype: str, g: torch.Generator, layout: str = "contiguous", special: str = "none"
) -> Tensor:
    """Normal values in a [rows, columns] view of the given layout; `special` stands in the middle."""
    if special not in SPECIALS:
        raise BadInput(f"special must be one of {', '.join(SPECIALS)}, got {special!r}")
    values = torch.randn(rows, columns, generator=g, device=g.device).to(dtype_of(dtype))
    if special != "none" and values.numel():
        values[rows // 2, columns // 2] = SPECIALS[special]
    return _lay(values, layout)


def vector(size: int, dtype: str, g: torch.Generator) -> Tensor:
    return torch.randn(size, generator=g, device=g.device).to(dtype_of(dtype))


def away_from_zero(shape: Any, g: torch.Generator) -> Tensor:
    """Normal values moved from zero by a half: a whole row may be judged by what one of them leaves."""
    values = torch.randn(shape, generator=g, device=g.device)
    return values + torch.full_like(values, 0.5).copysign(values)


def _lay(values: Tensor, layout: str) -> Tensor:
    rows, columns = values.shape
    if layout == "contiguous":
        return values
    if layout == "transposed":
        return values.t().contiguous().t()
    if layout not in LAYOUTS:
        raise BadInput(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    shift, stride = {
        "padded": (0, columns + 64),
        "misaligned": (1, columns + 3),  # no row starts on 16 bytes
        "far": (0, (2**31 // max(rows - 1, 1) // 64 + 1) * 64),
    }[layout]
    storage = torch.empty(
        shift + (rows - 1) * stride + columns if rows else 0, dtype=values.dtype, device=values.device
    )
    view = storage.as_strided((rows, columns), (stride, 1), shift)
    view.copy_(values)
    return view
