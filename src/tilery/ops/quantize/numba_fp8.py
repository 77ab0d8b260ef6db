"""Scales of fp8 in Numba kernels, as formats.py defines them; numba_elements' `store` rounds to fp8."""

from numba import int32

from tilery.languages.numba_elements import f32, rank, unrank
from tilery.languages.numba_glue import jit
from tilery.ops.quantize import formats

_TINY = f32(formats.TINY)
_INFINITY, _MANTISSA = int32(0x7F800000), int32(0x7FFFFF)


@jit
def magnitude(value):
    """An integer that orders as |value| does, with NaN on top: the greatest of them carries NaN."""
    return rank(abs(value))


@jit
def scale(amax, largest, pow2):
    """The scale of values whose greatest `magnitude` is amax; `largest` is the format's."""
    made = unrank(max(amax, rank(_TINY))) / f32(largest)
    if pow2 and rank(made) <= _INFINITY:  # a positive value's rank is its bits
        made = unrank((rank(made) + _MANTISSA) & _INFINITY)
    return made
