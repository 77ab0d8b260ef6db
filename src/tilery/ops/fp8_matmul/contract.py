"""Contracts of fp8_matmul and fp8_matmul_rowwise: c [M, N] = (a · a_scale) (b · b_scale)ᵀ; a [M, K], b [N, K]."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tilery.base.errors import require
from tilery.base.spec import DTYPES, Cost, TensorSpec, dtype_name
from tilery.core import inputs as draw
from tilery.ops.fp8_matmul.call import Fp8MatmulCall
from tilery.ops.quantize.formats import LARGEST

# Hopper's fp8 tensor cores drop what is 2**13 times smaller than the largest product they add, so that even sums that
# are promoted every 128 products may be off by some 3e-4. An fp32 output says how the sum is given, not how good it is.
ALLOWED = {torch.float32: 1e-3, torch.float16: 1e-3, torch.bfloat16: 4e-3}
FORMATS = tuple(LARGEST)
TO = tuple(map(dtype_name, ALLOWED))


def check_operands(call: Fp8MatmulCall, multiple: int) -> None:
    """`multiple`: what K must be a multiple of."""
    a, b = call.a, call.b
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
    require(call.out_dtype in TO, f"out_dtype must be one of {', '.join(TO)}, got {call.out_dtype!r}")


def check_scale(name: str, scale: TensorSpec, shapes: dict[str, tuple[int, ...]], of: TensorSpec) -> None:
    """`shapes`: the shapes it may have, by what they are in words."""
    require(scale.dtype == torch.float32, f"{name} must be fp32, got {dtype_name(scale.dtype)}")
    words = " or ".join(f"{list(shape)} ({what})" for what, shape in shapes.items())
    what = f"for {name[0]} {list(of.shape)}"
    require(scale.shape in shapes.values(), f"{name} must be {words} {what}, got {list(scale.shape)}")
    require(
        1 in scale.strides or any(size <= 1 for size in scale.shape),
        f"{name} must have stride 1 along one dimension, got strides {list(scale.strides)}; call .contiguous() on it",
    )


def outputs(call: Fp8MatmulCall) -> dict[str, TensorSpec]:
    return {"c": TensorSpec.contiguous((call.m, call.n), DTYPES[call.out_dtype], call.a.device)}


def cost(call: Fp8MatmulCall) -> Cost:
    reads = sum(x.nbytes for x in (call.a, call.a_scale, call.b, call.b_scale))
    return Cost(2 * call.m * call.n * call.k, reads, call.m * call.n * DTYPES[call.out_dtype].itemsize)


def exact(call: Fp8MatmulCall) -> str:
    """What a bucket of both ops says."""
    return f"n={call.n},k={call.k},{dtype_name(call.a.dtype)},{dtype_name(call.b.dtype)},{call.out_dtype}"


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
