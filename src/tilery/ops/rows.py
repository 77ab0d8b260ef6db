"""Ops that work row by row on [..., N]: how such a tensor is read, checked, costed and drawn. Once for all of them."""

from typing import Any, NamedTuple

from tilery import inputs
from tilery.errors import require
from tilery.spec import Bucket, Case, Cost, TensorSpec, case, dtype_name


class Rows(NamedTuple):
    m: int  # rows
    n: int  # elements in a row
    stride: int  # elements from one row to the next


def rows(x: Any) -> Rows:
    """[..., N] as M rows; x is a tensor or a spec that passed `check_rows`."""
    shape = x.shape
    if len(shape) == 2:  # the common one, kept short: it is on the way of every launch
        return Rows(shape[0], shape[1], x.stride(0))
    m = 1
    for size in shape[:-1]:
        m *= size
    # A dimension of size 1 may have any stride: the innermost that is longer tells the distance of rows.
    stride = next((x.stride(d) for d in range(len(shape) - 2, -1, -1) if shape[d] > 1), shape[-1])
    return Rows(m, shape[-1], stride)


def check_rows(name: str, x: TensorSpec, dtypes: Any) -> None:
    require(x.dtype in dtypes, f"{name} must be one of {', '.join(map(dtype_name, dtypes))}, got {dtype_name(x.dtype)}")
    require(len(x.shape) >= 1, f"{name} must be [..., N], got a scalar")
    require(
        x.stride(-1) == 1 or x.shape[-1] <= 1,
        f"{name} must have stride 1 along its last dimension, got strides {list(x.strides)}; call .contiguous() on it",
    )
    step = None  # the stride that the next longer dimension must have for the rows to lie evenly
    for d in range(len(x.shape) - 2, -1, -1):
        if x.shape[d] == 1:
            continue
        require(
            step is None or x.stride(d) == step,
            f"{name} must have its rows evenly spaced, got shape {list(x.shape)} with strides {list(x.strides)}; "
            "call .contiguous() on it",
        )
        step = x.stride(d) * x.shape[d]


def check_like(name: str, x: TensorSpec, other_name: str, other: TensorSpec) -> None:
    """`x` must have the shape and dtype of `other`."""
    require(x.shape == other.shape, f"{name} must be {list(other.shape)} as {other_name} is, got {list(x.shape)}")
    require(
        x.dtype == other.dtype,
        f"{name} must be {dtype_name(other.dtype)} as {other_name} is, got {dtype_name(x.dtype)}",
    )


def bucket_rows(x: TensorSpec) -> Bucket:
    m, n, _ = rows(x)
    return Bucket(exact=f"n={n},{dtype_name(x.dtype)}", scaled={"m": m})


def cost_rows(x: TensorSpec, flops: int, reads: int = 1, writes: int = 1, extra: int = 0) -> Cost:
    """`flops` an element; so many tensors of x's size read and written, and `extra` bytes read."""
    m, n, _ = rows(x)
    return Cost(flops * m * n, reads * x.nbytes + extra, writes * x.nbytes)


def draw(m: int, n: int, dtype: str, g: Any, layout: str, special: str, batch: int) -> Any:
    """[m, n], or [batch, m, n] where batch is not 0."""
    x = inputs.matrix(m * max(batch, 1), n, dtype, g, layout, special)
    return x.unflatten(0, (batch, m)) if batch else x


def cases(refused_by: dict[str, str] | None = None) -> list[Case]:
    """What every row-wise op must bear; `refused_by` holds for the longest row."""
    return [
        case(m=3, n=4096, dtype="fp32"),
        case(m=3, n=4096, dtype="bf16"),
        case(m=3, n=127, dtype="fp32"),  # masked tail
        case(m=3, n=127, dtype="bf16"),
        case(m=5, n=1000, dtype="fp16"),
        case(m=1, n=4096, dtype="fp16"),  # one row
        case(m=1, n=1, dtype="fp32"),
        case(m=0, n=128, dtype="fp32"),  # nothing to launch
        case(m=4, n=0, dtype="bf16"),
        case(m=2, n=96, dtype="fp32", batch=3),  # [batch, m, n]
        case(m=5, n=256, dtype="fp16", layout="padded"),
        case(m=5, n=256, dtype="fp32", layout="misaligned"),
        case(m=5, n=257, dtype="bf16", layout="misaligned"),
        case(m=3, n=72, dtype="fp16", layout="far"),  # more than 2**31 elements from first to last
        case(m=3, n=200, dtype="fp32", special="nan"),
        case(m=3, n=200, dtype="fp16", special="inf"),
        case(m=3, n=200, dtype="bf16", special="-inf"),
        case(m=2, n=65537, dtype="fp32", refused_by=refused_by),
    ]


def bench_cases() -> dict[str, list[Case]]:
    return {
        "bench": [case(m=m, n=n, dtype="bf16") for m, n in ((16, 4096), (8192, 4096), (4096, 16384))],
        "bench_cpu": [case(m=2048, n=4096, dtype="fp32"), case(m=2048, n=4096, dtype="bf16")],
    }
