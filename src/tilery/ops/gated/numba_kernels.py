"""Gated activations, relu_squared and their backwards in Numba: rows in parallel over the cores, each in one pass."""

import numpy as np
from numba import prange

from tilery.base.launch import Launch
from tilery.base.rows import rows
from tilery.core.call import Call
from tilery.languages.numba_elements import STORAGE, at, f32, load, store
from tilery.languages.numba_glue import jit, kernel
from tilery.ops.gated.call import GatedCall
from tilery.ops.gated.numba_activations import ACTS, activated, factor_and_slope
from tilery.ops.rows.numba_rows import Config, NumbaRows

# silu_mul, gelu_mul


@jit
def _gated_row(row, gate, up, y, gate_stride, up_stride, up_start, n, act, dtype):
    gate, up, y = at(gate, row * gate_stride, dtype), at(up, row * up_stride + up_start, dtype), at(y, row * n, dtype)
    for j in range(n):
        store(y, j, activated(load(gate, j, dtype), act) * load(up, j, dtype), dtype)


@kernel
def _gated(threads, gate, up, y, gate_stride, up_stride, up_start, m, n, act, dtype):
    if threads > 1:
        for i in prange(m):  # it counts unsigned, and unsigned times signed is a float
            _gated_row(np.int64(i), gate, up, y, gate_stride, up_stride, up_start, n, act, dtype)
    else:
        for i in range(m):
            _gated_row(i, gate, up, y, gate_stride, up_stride, up_start, n, act, dtype)


@jit
def _gated_row_backward(row, tensors, strides, up_start, dup_start, n, act, dtype):
    dy, gate, up, dgate, dup = tensors
    dy_stride, gate_stride, up_stride, d_stride = strides
    dy, gate = at(dy, row * dy_stride, dtype), at(gate, row * gate_stride, dtype)
    up, dgate = at(up, row * up_stride + up_start, dtype), at(dgate, row * d_stride, dtype)
    dup = at(dup, row * d_stride + dup_start, dtype)
    for j in range(n):
        d, g = load(dy, j, dtype), load(gate, j, dtype)
        factor, slope = factor_and_slope(g, act)
        store(dgate, j, d * load(up, j, dtype) * slope, dtype)
        store(dup, j, d * g * factor, dtype)


@kernel
def _gated_backward(threads, tensors, strides, up_start, dup_start, m, n, act, dtype):
    """tensors: dy, gate, up, dgate, dup. strides: of rows of dy, gate and up, and of dgate and dup."""
    if threads > 1:
        for i in prange(m):
            _gated_row_backward(np.int64(i), tensors, strides, up_start, dup_start, n, act, dtype)
    else:
        for i in range(m):
            _gated_row_backward(i, tensors, strides, up_start, dup_start, n, act, dtype)


class Gated(NumbaRows):
    least = 2**16

    def launches(self, call: GatedCall, config: Config) -> list[Launch]:
        (gate, up), (m, n, _) = call.sources, call.rows
        args = {
            "gate": gate, "up": up, "y": call.y,
            "gate_stride": rows(gate).stride, "up_stride": rows(up).stride, "up_start": call.up_start,
            "m": m, "n": n, "act": ACTS[call.act], "dtype": STORAGE[gate.dtype],
        }  # fmt: skip
        return [Launch(_gated, 1, args, options={"parallel": config.parallel})]


class GatedBackward(NumbaRows):
    least = 2**16

    def launches(self, call: GatedCall, config: Config) -> list[Launch]:
        (gate, up), (m, n, _) = call.sources, call.rows
        if call.packed is None:
            dgate, dup, d_stride, dup_start = call.dgate, call.dup, n, 0
        else:
            dgate, dup, d_stride, dup_start = call.dx, call.dx, 2 * n, n
        args = {
            "tensors": (call.dy, gate, up, dgate, dup),
            "strides": (rows(call.dy).stride, rows(gate).stride, rows(up).stride, d_stride),
            "up_start": call.up_start, "dup_start": dup_start,
            "m": m, "n": n, "act": ACTS[call.act], "dtype": STORAGE[gate.dtype],
        }  # fmt: skip
        return [Launch(_gated_backward, 1, args, options={"parallel": config.parallel})]


gated, gated_backward = Gated(), GatedBackward()

# relu_squared


@jit
def _positive(value):
    return f32(0) if value < f32(0) else value  # written so that NaN stays


@jit
def _relu_squared_row(row, x, y, x_stride, n, dtype):
    x, y = at(x, row * x_stride, dtype), at(y, row * n, dtype)
    for j in range(n):
        positive = _positive(load(x, j, dtype))
        store(y, j, positive * positive, dtype)


@kernel
def _relu_squared(threads, x, y, x_stride, m, n, dtype):
    if threads > 1:
        for i in prange(m):  # it counts unsigned, and unsigned times signed is a float
            _relu_squared_row(np.int64(i), x, y, x_stride, n, dtype)
    else:
        for i in range(m):
            _relu_squared_row(i, x, y, x_stride, n, dtype)


@jit
def _relu_squared_row_backward(row, dy, x, dx, dy_stride, x_stride, n, dtype):
    dy, x, dx = at(dy, row * dy_stride, dtype), at(x, row * x_stride, dtype), at(dx, row * n, dtype)
    for j in range(n):
        store(dx, j, f32(2) * load(dy, j, dtype) * _positive(load(x, j, dtype)), dtype)


@kernel
def _relu_squared_backward(threads, dy, x, dx, dy_stride, x_stride, m, n, dtype):
    if threads > 1:
        for i in prange(m):
            _relu_squared_row_backward(np.int64(i), dy, x, dx, dy_stride, x_stride, n, dtype)
    else:
        for i in range(m):
            _relu_squared_row_backward(i, dy, x, dx, dy_stride, x_stride, n, dtype)


class ReluSquared(NumbaRows):
    least = 2**16

    def launches(self, call: Call, config: Config) -> list[Launch]:
        m, n, stride = rows(call.x)
        args = {"x": call.x, "y": call.y, "x_stride": stride, "m": m, "n": n, "dtype": STORAGE[call.x.dtype]}
        return [Launch(_relu_squared, 1, args, options={"parallel": config.parallel})]


class ReluSquaredBackward(NumbaRows):
    least = 2**16

    def launches(self, call: Call, config: Config) -> list[Launch]:
        m, n, stride = rows(call.x)
        args = {"dy": call.dy, "x": call.x, "dx": call.dx, "dy_stride": rows(call.dy).stride, "x_stride": stride}
        args |= {"m": m, "n": n, "dtype": STORAGE[call.x.dtype]}
        return [Launch(_relu_squared_backward, 1, args, options={"parallel": config.parallel})]


relu_squared, relu_squared_backward = ReluSquared(), ReluSquaredBackward()
