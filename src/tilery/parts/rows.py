"""Ops that work row by row on [..., N]: how such a tensor is read, checked, costed and drawn. Once for all of them."""

from collections.abc import Callable
from typing import Any, NamedTuple

from tilery.base.errors import require
from tilery.base.spec import Bucket, Case, Cost, TensorSpec, case, dtype_name
from tilery.core import inputs
from tilery.hardware import device


class Rows(NamedTuple):
    m: int  # rows
    n: int  # elements in a row
    stride: int  # elements from one row to the next


class Heads(NamedTuple):
    """Rows at two distances, as heads of packed qkv lie: row r begins at r // heads · stride + r % heads · step."""

    m: int
    n: int
    stride: int  # elements from one group of rows to the next
    heads: int  # rows in a group, 1 where all rows are evenly spaced
    step: int  # elements from one row to the next inside a group


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


_FEW = 32  # rows, which leave processors to share them
_CLUSTERED = 90  # the first architecture whose blocks share rows


def cuda_first(few: int, many: int = 2**62) -> Callable[..., str | None]:
    """`first` of ops whose long rows CUDA's clusters share: few rows from this length on, any number from `many` on.

    rms_norm of 16 × 65536 takes 3.9 µs so on an H200, 8.0 in Triton. Only of rows on 16 bytes, as was measured.
    """

    def first(x: TensorSpec, *_: Any) -> str | None:
        m, n, stride = rows(x)
        long = n >= (few if m <= _FEW else many)
        return "cuda" if long and x.aligned and not (n | stride) % 8 and _clustered(x) else None

    return first


def _clustered(x: TensorSpec) -> bool:
    return x.device.type == "cuda" and int(device.arch(x.device).removeprefix("sm_")) >= _CLUSTERED


def joined(*tensors: Any) -> tuple[int, ...]:
    """Rows, elements in a row, and each tensor's stride; one long row where all lie end to end."""
    found = [rows(t) for t in tensors]
    m, n, _ = found[0]
    if m <= 1 or all(r.stride == n for r in found):
        return 1, m * n, *(0 for _ in found)
    return m, n, *(r.stride for r in found)


def heads(x: Any) -> Heads:
    """[..., N] as M rows at up to two distances; x is a tensor or a spec that passed `check_rows` with levels=2."""
    shape = x.shape
    if len(shape) == 2:
        return Heads(shape[0], shape[1], x.stride(0), 1, 0)
    m, n, stride = rows(x)
    found = _levels(x)
    if len(found) < 2:
        return Heads(m, n, stride, 1, 0)
    (count, step), (_, stride) = found
    return Heads(m, n, stride, count, step)


def heads_refusal(x: TensorSpec) -> str | None:
    """Of kernels that take evenly spaced rows only."""
    if len(_levels(x)) < 2:
        return None
    return f"rows of shape {list(x.shape)} with strides {list(x.strides)} lie at two distances; this kernel takes one"


def _levels(x: Any) -> list[tuple[int, int]]:
    """(rows, distance) from the inside out: dimensions that lie evenly together are one level."""
    found: list[tuple[int, int]] = []
    if 0 in x.shape:  # no rows, or rows of nothing, lie anywhere
        return found
    for d in range(len(x.shape) - 2, -1, -1):
        size, stride = x.shape[d], x.stride(d)
        if size == 1:  # may have any stride
            continue
        if found and found[-1][0] * found[-1][1] == stride:
            found[-1] = (found[-1][0] * size, found[-1][1])
        else:
            found.append((size, stride))
    return found


def check_rows(name: str, x: TensorSpec, dtypes: Any, levels: int = 1) -> None:
    require(x.dtype in dtypes, f"{name} must be one of {', '.join(map(dtype_name, dtypes))}, got {dtype_name(x.dtype)}")
    require(len(x.shape) >= 1, f"{name} must be [..., N], got a scalar")
    require(
        x.stride(-1) == 1 or x.shape[-1] <= 1,
        f"{name} must have stride 1 along its last dimension, got strides {list(x.strides)}; call .contiguous() on it",
    )
    require(
        len(_levels(x)) <= levels,
        f"{name} must have its rows evenly spaced{' but for one dimension' if levels == 2 else ''}, got shape "
        f"{list(x.shape)} with strides {list(x.strides)}; call .contiguous() on it",
    )


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
