"""Scales of fp8 for Numba kernels, as parts/fp8.py defines them; numba_glue's `store` rounds to fp8."""

from numba import int32

from tilery.languages import numba_glue
from tilery.languages.numba_elements import f32, rank, unrank
from tilery.parts import fp8

_TINY = f32(fp8.TINY)
_INFINITY, _MANTISSA = int32(0x7F800000), int32(0x7FFFFF)


@numba_glue.jit
def magnitude(value):
    """An integer that orders as |value| does, with NaN on top: the greatest of them carries NaN."""
    return rank(abs(value))


@numba_glue.jit
def scale(amax, largest, pow2):
    """The scale of values whose greatest `magnitude` is amax; `largest` is the format's."""
    made = unrank(max(amax, rank(_TINY))) / f32(largest)
    if pow2 and rank(made) <= _INFINITY:  # a positive value's rank is its bits
        made = unrank((rank(made) + _MANTISSA) & _INFINITY)
    return made
