"""The largest values of a row in Numba: its k largest so far are kept in order, and few values get in among them."""

import numpy as np

from tilery.languages.numba_elements import load, rank
from tilery.languages.numba_glue import jit

_LARGEST = np.int32(2**31 - 1)
_ZERO, _MINUS_ZERO = np.int32(0), np.int32(-1)  # as ranks


@jit
def order(value):
    """An int32 that orders as the fp32 value does, both zeros alike, NaN above all.

    In choices, not branches: with these LLVM makes no vectors of a loop, and argmax took 2.5 times as long.
    """
    ordered = rank(value)
    ordered = _ZERO if ordered == _MINUS_ZERO else ordered
    return _LARGEST if value != value else ordered


@jit
def pick(x, n, k, found, places, dtype):
    """The k largest of a row in order, the lower index first of equals."""
    count = 0
    for j in range(n):
        value = order(load(x, j, dtype))
        if count == k and value <= found[k - 1]:
            continue
        count = min(count + 1, k)
        i = count - 1
        while i > 0 and found[i - 1] < value:
            found[i], places[i] = found[i - 1], places[i - 1]
            i -= 1
        found[i], places[i] = value, j
