"""activation_backward in Numba: rows in parallel over the cores, each in one pass."""

import numpy as np
from numba import prange, types
from numba.extending import overload

from tilery.base.launch import Launch
from tilery.base.rows import rows
from tilery.core.call import Call
from tilery.languages.numba_elements import STORAGE, at, f32, load, store
from tilery.languages.numba_glue import jit, kernel
from tilery.ops.gated.numba_activations import ACTS, factor_and_slope
from tilery.ops.rows.numba_rows import Config, NumbaRows

# A number whose type says which activation it is, as in gated ops.
_ACTS = {"relu": np.int64(0), "silu": ACTS["silu"], "gelu": ACTS["none"], "gelu_tanh": ACTS["tanh"]}


def _gradient(dy, z, act):
    """dy · act'(z)."""


@overload(_gradient)
def _gradient_of(dy, z, act):
    if act == types.int64:
        return lambda dy, z, act: f32(0) if z <= f32(0) else dy  # no product: 0 · inf would be NaN
    return lambda dy, z, act: dy * factor_and_slope(z, act)[1]


@jit
def _row(row, dy, z, dz, dy_stride, z_stride, n, act, dtype):
    dy, z, dz = at(dy, row * dy_stride, dtype), at(z, row * z_stride, dtype), at(dz, row * n, dtype)
    for j in range(n):
        store(dz, j, _gradient(load(dy, j, dtype), load(z, j, dtype), act), dtype)


@kernel
def _activation_backward(threads, dy, z, dz, dy_stride, z_stride, m, n, act, dtype):
    if threads > 1:
        for i in prange(m):  # it counts unsigned, and unsigned times signed is a float
            _row(np.int64(i), dy, z, dz, dy_stride, z_stride, n, act, dtype)
    else:
        for i in range(m):
            _row(i, dy, z, dz, dy_stride, z_stride, n, act, dtype)


class ActivationBackward(NumbaRows):
    least = 2**16

    def launches(self, call: Call, config: Config) -> list[Launch]:
        m, n, z_stride = rows(call.z)
        args = {
            "dy": call.dy, "z": call.z, "dz": call.dz, "dy_stride": rows(call.dy).stride, "z_stride": z_stride,
            "m": m, "n": n, "act": _ACTS[call.activation], "dtype": STORAGE[call.z.dtype],
        }  # fmt: skip
        return [Launch(_activation_backward, 1, args, options={"parallel": config.parallel})]


activation_backward = ActivationBackward()
