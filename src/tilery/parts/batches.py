"""Products of several matrices of one size, [count, rows, columns]: how they are checked, read and drawn."""

from typing import Any

import torch
from torch import Tensor

from tilery.base.errors import BadInput, require
from tilery.base.spec import TensorSpec, Work, dtype_name
from tilery.core import inputs
from tilery.parts.products import ALLOWED


def check_operand(name: str, x: TensorSpec, sizes: str) -> None:
    """`sizes` names the dimensions; one of the last two must be contiguous, what stands before lies anywhere."""
    require(x.dtype in ALLOWED, f"{name} must be {', '.join(map(dtype_name, ALLOWED))}, got {dtype_name(x.dtype)}")
    count = sizes.count(",") + 1
    require(len(x.shape) == count, f"{name} must be {sizes}, {count} dimensions, got shape {list(x.shape)}")
    require(
        1 in x.strides[-2:] or x.shape[-2] <= 1 or x.shape[-1] <= 1,
        f"{name} {sizes} must have stride 1 along one of its last two dimensions, got strides {list(x.strides)}; "
        "call .contiguous() on it",
    )


def check_same_dtype(a: TensorSpec, b: TensorSpec) -> None:
    require(a.dtype == b.dtype, f"b must be {dtype_name(a.dtype)} as a is, got {dtype_name(b.dtype)}")


def layout(x: Any) -> str:
    """'n' where rows are contiguous, 't' where columns are; x is a tensor or a spec."""
    return "n" if x.stride(-1) == 1 or (x.shape[-1] == 1 and x.stride(-2) != 1) else "t"


def draw(
    count: int, rows: int, columns: int, dtype: str, g: torch.Generator, layout: str = "contiguous",
    special: str = "none",
) -> Tensor:  # fmt: skip
    """Normal values in a [count, rows, columns] view; "transposed": of matrices [columns, rows], each contiguous."""
    if layout not in inputs.LAYOUTS:
        raise BadInput(f"layout must be one of {', '.join(inputs.LAYOUTS)}, got {layout!r}")
    if layout == "transposed":
        values = inputs.matrix(count * columns, rows, dtype, g, special=special)
        return values.unflatten(0, (count, columns)).transpose(1, 2)
    return inputs.matrix(count * rows, columns, dtype, g, layout, special).unflatten(0, (count, rows))


def tiled(tiles: int, rows: int, n: int, k: int, block_m: int, block_n: int, itemsize: int) -> Work:
    """Of products with `tiles` tiles, cut from matrices of about `rows` rows; edges are multiplied, but not read."""
    height, width = min(block_m, rows), min(block_n, n)
    return Work(tiles, 2 * block_m * block_n * k, ((height + width) * k + height * width) * itemsize)
