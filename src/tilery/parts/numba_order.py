"""Floats as integers in Numba, for kernels that search and compare."""

import numpy as np

from tilery.backends import numba_glue
from tilery.backends.numba_glue import rank

LARGEST = np.int32(2**31 - 1)


@numba_glue.jit
def order(value):
    """An int32 that orders as the fp32 value does, both zeros alike, NaN above all."""
    if value != value:
        return LARGEST
    return np.int32(0) if value == 0 else rank(value)
