"""Contracts of row-wise ops, on tensors [..., N]: how they are checked, costed and drawn, and which cases they have."""

from collections.abc import Callable
from typing import Any

from tilery.base.errors import require
from tilery.base.rows import levels as row_levels
from tilery.base.rows import rows
from tilery.base.spec import Bucket, Case, Cost, TensorSpec, case, dtype_name
from tilery.core import inputs
from tilery.core.call import Call
from tilery.hardware import device
from tilery.hardware.gpu import CLUSTERS

_FEW = 32  # rows, which leave SMs idle unless a row is shared by several


def cuda_first(few: int, many: int = 2**62, of: str = "x") -> Callable[[Call], str | None]:
    """`first` of ops whose long rows clusters share in CUDA C++: few rows from length `few` on, any number from `many`.

    rms_norm of 16 × 65536 takes 3.9 µs so on an H200, 8.0 in Triton. Only rows on 16 bytes were measured. `of` names
    the argument whose rows they are.
    """

    def first(call: Call) -> str | None:
        x: TensorSpec = getattr(call, of)
        m, n, stride = rows(x)
        long = n >= (few if m <= _FEW else many)
        clusters = x.device.type == "cuda" and device.arch_number(x.device) >= CLUSTERS
        return "cuda" if long and x.aligned and not (n | stride) % 8 and clusters else None

    return first


def check_rows(name: str, x: TensorSpec, dtypes: Any, levels: int = 1) -> None:
    require(x.dtype in dtypes, f"{name} must be one of {', '.join(map(dtype_name, dtypes))}, got {dtype_name(x.dtype)}")
    require(len(x.shape) >= 1, f"{name} must be [..., N], got a scalar")
    require(
        x.stride(-1) == 1 or x.shape[-1] <= 1,
        f"{name} must have stride 1 along its last dimension, got strides {list(x.strides)}; call .contiguous() on it",
    )
    require(
        len(row_levels(x)) <= levels,
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


def like(x: TensorSpec, dtype: Any = None) -> TensorSpec:
    """A contiguous tensor of x's shape, on its device."""
    return TensorSpec.contiguous(x.shape, dtype or x.dtype, x.device)


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
