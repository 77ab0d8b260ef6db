"""Scales and rounding to fp8 in Triton kernels, as formats.py defines them: in the interpreter and on sm_80 too.

fp8 tensors go to a kernel as bytes: Triton does not know e4m3 on sm_80, not even as a pointer.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from tilery.hardware.gpu import FP8_CONVERSION, gpu
from tilery.ops.quantize import formats

_TINY_BITS = tl.constexpr(int(torch.tensor(formats.TINY).view(torch.int32)))
_LARGEST_E4M3, _LARGEST_E5M2 = tl.constexpr(formats.LARGEST["e4m3"]), tl.constexpr(formats.LARGEST["e5m2"])
_NAN_FROM = tl.constexpr(0x7F800001)  # magnitudes above infinity's


def as_bytes(values: Any) -> Any:
    """The spec of an fp8 tensor, as one of uint8."""
    return values._replace(dtype=torch.uint8)


def native(where: torch.device) -> bool:
    """Whether the device converts to fp8 itself: what kernels take as NATIVE."""
    interpreted = not isinstance(quantize, triton.JITFunction)  # its cast is not to nearest even
    return not interpreted and gpu(where).number >= FP8_CONVERSION


@triton.jit
def magnitude(x):
    """The bits of |x|, x fp32: they order as |x| does, and NaN is on top, where tl.max of floats would drop it."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale(amax, FORMAT: tl.constexpr, POW2: tl.constexpr):
    """The scale of values whose greatest `magnitude` is amax."""
    LARGEST: tl.constexpr = _LARGEST_E4M3 if FORMAT == "e4m3" else _LARGEST_E5M2
    made = tl.div_rn(tl.maximum(amax, _TINY_BITS).to(tl.float32, bitcast=True), LARGEST)
    if POW2:
        bits = made.to(tl.int32, bitcast=True)
        up = (bits + 0x7FFFFF) & 0x7F800000  # the next power of two: a mantissa of 0
        made = tl.where(bits >= _NAN_FROM, bits, up).to(tl.float32, bitcast=True)
    return made


@triton.jit
def quantize(x, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """fp32 as the bits of fp8, to nearest even; what is too large becomes the largest, NaN stays."""
    if NATIVE:
        FP8: tl.constexpr = tl.float8e4nv if FORMAT == "e4m3" else tl.float8e5
        return x.to(FP8).to(tl.uint8, bitcast=True)
    MANTISSA: tl.constexpr = 3 if FORMAT == "e4m3" else 2
    BIAS: tl.constexpr = 7 if FORMAT == "e4m3" else 15
    MOST: tl.constexpr = 0x7E if FORMAT == "e4m3" else 0x7B
    DROPPED: tl.constexpr = 23 - MANTISSA
    STEPS: tl.constexpr = (127 + 24 - BIAS - MANTISSA) << 23  # bits of 2**23 steps of the values nearest to 0
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    up = size + ((size >> DROPPED) & 1) + ((1 << (DROPPED - 1)) - 1)
    normal = (up >> DROPPED) - ((127 - BIAS) << MANTISSA)
    steps = tl.full(x.shape, STEPS, tl.int32).to(tl.float32, bitcast=True)
    small = (size.to(tl.float32, bitcast=True) + steps).to(tl.int32, bitcast=True) - STEPS  # the sum rounds
    made = tl.minimum(tl.where(size < ((128 - BIAS) << 23), small, normal), MOST)
    made = tl.where(size >= _NAN_FROM, 0x7F, made)
    return (made | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def widen(bits, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """The bits of fp8 as fp32."""
    if NATIVE:
        FP8: tl.constexpr = tl.float8e4nv if FORMAT == "e4m3" else tl.float8e5
        return bits.to(FP8, bitcast=True).to(tl.float32)
    MANTISSA: tl.constexpr = 3 if FORMAT == "e4m3" else 2
    LIFT: tl.constexpr = 2.0**120 if FORMAT == "e4m3" else 2.0**112  # between the two exponents' biases
    SPECIAL: tl.constexpr = 0x7F if FORMAT == "e4m3" else 0x7C  # from here on infinity, if there is one, and NaN
    bits = bits.to(tl.int32)
    size = (bits & 0x7F) << (23 - MANTISSA)
    lifted = (size.to(tl.float32, bitcast=True) * LIFT).to(tl.int32, bitcast=True)  # exact, for subnormals too
    made = tl.where((bits & 0x7F) >= SPECIAL, size | 0x7F800000, lifted)
    return (made | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True)
