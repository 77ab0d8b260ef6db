"""Philox-4x32-10 in Numba kernels, as philox.py defines it."""

import numpy as np
from numba import uint32, uint64

from tilery.languages.numba_glue import jit
from tilery.ops.memory import philox

_M0, _M1 = (np.uint64(m) for m in philox.MULTIPLIERS)
_S0, _S1 = (np.uint32(s) for s in philox.KEY_STEPS)
_ROUNDS, _HALF = philox.ROUNDS, np.uint64(32)


@jit
def words(key0, key1, c0, c1):
    """The four words, uint32, of the counter (c0, c1, 0, 0). Of all arguments the lower 32 bits count."""
    c0, c1, c2, c3 = uint32(c0), uint32(c1), uint32(0), uint32(0)
    k0, k1 = uint32(key0), uint32(key1)
    for _ in range(_ROUNDS):
        product0, product1 = uint64(c0) * _M0, uint64(c2) * _M1
        c0 = uint32(product1 >> _HALF) ^ c1 ^ k0
        c2 = uint32(product0 >> _HALF) ^ c3 ^ k1
        c1, c3 = uint32(product1), uint32(product0)
        k0, k1 = uint32(k0 + _S0), uint32(k1 + _S1)
    return c0, c1, c2, c3
