"""Products of fp8 matrices with scales: what their contracts share. c [M, N] = (a · a_scale) (b · b_scale)ᵀ."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilery.base.errors import require
from tilery.base.spec import DTYPES, Cost, TensorSpec, Work, dtype_name
from tilery.core import inputs as draw
from tilery.parts.fp8 import GROUP, LARGEST
from tilery.parts.tiles import tiled_product

# Hopper's fp8 tensor cores drop what is 2**13 times smaller than the largest product they add, so that even sums that
# are promoted every 128 products may be off by some 3e-4. An fp32 output says how the sum is given, not how good it is.
ALLOWED = {torch.float32: 1e-3, torch.float16: 1e-3, torch.bfloat16: 4e-3}
FORMATS = tuple(LARGEST)
TO = tuple(map(dtype_name, ALLOWED))


def check_operands(a: TensorSpec, b: TensorSpec, out_dtype: str, multiple: int) -> None:
    for name, x, letter in (("a", a, "M"), ("b", b, "N")):
        kind = dtype_name(x.dtype)
        require(kind in FORMATS, f"{name} must be {' or '.join(FORMATS)}, got {kind}; quantize_fp8 makes it")
        require(len(x.shape) == 2, f"{name} must be a matrix [{letter}, K], got shape {list(x.shape)}")
        require(
            x.stride(1) == 1 or x.shape[1] <= 1,
            f"{name} [{letter}, K] must have K contiguous, got strides {list(x.strides)}; call .contiguous() on it",
        )
    k = a.shape[1]
    require(k == b.shape[1], f"a [M, K] and b [N, K] must agree in K, got {list(a.shape)} and {list(b.shape)}")
    require(k % multiple == 0, f"K must be a multiple of {multiple}, got {k}; pad a and b with zeros along K")
    require(out_dtype in TO, f"out_dtype must be one of {', '.join(TO)}, got {out_dtype!r}")


def check_scale(name: str, scale: TensorSpec, shapes: dict[str, tuple[int, ...]], of: TensorSpec) -> None:
    """`shapes` holds the shapes it may have, by what they are in words."""
    require(scale.dtype == torch.float32, f"{name} must be fp32, got {dtype_name(scale.dtype)}")
    words = " or ".join(f"{list(shape)} ({what})" for what, shape in shapes.items())
    what = f"for {name[0]} {list(of.shape)}"
    require(scale.shape in shapes.values(), f"{name} must be {words} {what}, got {list(scale.shape)}")
    require(
        1 in scale.strides or any(size <= 1 for size in scale.shape),
        f"{name} must have stride 1 along one dimension, got strides {list(scale.strides)}; call .contiguous() on it",
    )


def scale_layout(scale: Any) -> str:
    """'row' or 'column', as parts/fp8.py names them; of a tensor or a spec of two dimensions."""
    return "row" if scale.stride(1) == 1 else "column"


def scale_steps(scale: Any, count: int) -> tuple[int, int, int]:
    """Of a matrix of `count` rows: how many share a scale, and the strides of scales from row to row and along K."""
    if len(scale.shape) == 1:
        return 1, 0, 0
    high = 1 if scale.shape[0] == count else GROUP
    return high, scale.stride(0), scale.stride(1) if scale.shape[1] > 1 else 0


def outputs(
    a: TensorSpec, a_scale: TensorSpec, b: TensorSpec, b_scale: TensorSpec, out_dtype: str
) -> tuple[TensorSpec, ...]:
    return (TensorSpec.contiguous((a.shape[0], b.shape[0]), DTYPES[out_dtype], a.device),)


def cost(a: TensorSpec, a_scale: TensorSpec, b: TensorSpec, b_scale: TensorSpec, out_dtype: str) -> Cost:
    (m, k), n = a.shape, b.shape[0]
    reads = sum(x.nbytes for x in (a, a_scale, b, b_scale))
    return Cost(2 * m * n * k, reads, m * n * DTYPES[out_dtype].itemsize)


def split_work(a: TensorSpec, b: TensorSpec, rows: int, columns: int, parts: int) -> Work:
    """Of tiles whose K is cut in parts, which a second launch adds up."""
    transposed = b._replace(shape=b.shape[::-1], strides=b.strides[::-1])
    work = tiled_product(a, transposed, rows, columns, parts)
    part = min(rows, a.shape[0]) * min(columns, b.shape[0]) * 4
    return work if parts == 1 else work._replace(bytes=work.bytes + 2 * part)  # written, and read again


def split_workspace(a: TensorSpec, b: TensorSpec, parts: int) -> tuple[TensorSpec, ...]:
    if parts == 1:
        return ()
    return (TensorSpec.contiguous((parts, a.shape[0], b.shape[0]), torch.float32, a.device),)


def exact(a: TensorSpec, b: TensorSpec, out_dtype: str) -> str:
    """What a bucket of both ops says."""
    return f"n={b.shape[0]},k={a.shape[1]},{dtype_name(a.dtype)},{dtype_name(b.dtype)},{out_dtype}"


def draw_scale(spec: TensorSpec, g: torch.Generator, special: str) -> Tensor:
    """From 0.5 to 1.5; `special` (nan, inf or zero) stands in the middle."""
    scale = spec.empty().copy_(torch.rand(spec.shape, generator=g, device=g.device) + 0.5)
    known = {**draw.SPECIALS, "zero": 0.0}
    require(special in known, f"special_scale must be one of {', '.join(known)}, got {special!r}")
    if special != "none" and scale.numel():
        scale[tuple(size // 2 for size in scale.shape)] = known[special]
    return scale


def wide(a: Tensor) -> torch.dtype:
    """What a user would multiply in without fp8 products."""
    return torch.bfloat16 if a.is_cuda else torch.float32


def scaled_mm(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, recipes: tuple[str, str], out: str) -> Tensor:
    """cuBLASLt as torch calls it; recipes are names of torch's ScalingType."""
    kinds = [getattr(F.ScalingType, name) for name in recipes]
    return F.scaled_mm(a, b.t(), a_scale, kinds[0], b_scale, kinds[1], output_dtype=DTYPES[out])
