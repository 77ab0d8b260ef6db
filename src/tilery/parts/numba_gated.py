"""Gated activations in Numba: rows in parallel over the cores, each in one pass."""

import numpy as np
from numba import prange, types
from numba.extending import overload

from tilery.base.spec import Artifact, TensorSpec
from tilery.languages import numba_glue
from tilery.languages.numba_elements import at, exp, f32, load, store
from tilery.parts import gated, numba_rows
from tilery.parts.numba_rows import Config, archs
from tilery.parts.rows import rows

__all__ = ["Config", "archs", "compile", "configs", "default", "refusal", "run"]

# A number whose type says which activation it is, so that each is compiled for itself.
ACTS = {"silu": np.int8(0), "tanh": np.int16(0), "none": np.int32(0)}

_LINEAR, _CUBIC, _CUBIC_SLOPE = f32(gated.LINEAR), f32(gated.CUBIC), f32(3 * gated.CUBIC)
_RATE, _DENSITY, _HALF = f32(gated.RATE), f32(gated.DENSITY), f32(0.5)
_P1, _P2, _P3, _P4, _P5, _P6, _P7, _P8, _P9 = map(f32, gated.TAIL)


def refusal(first: TensorSpec, *_, config: Config | None = None) -> str | None:
    return numba_rows.refusal(first)


def default(first: TensorSpec, *_) -> Config:
    return numba_rows.default(first, least=2**16)


def configs(*specs) -> list[Config]:
    return numba_rows.configs()


@numba_glue.jit
def _normal(g):
    """The normal distribution's share below g, and exp(-g²/2)."""
    t = f32(1) / (f32(1) + _RATE * abs(g))
    high = (((_P9 * t + _P8) * t + _P7) * t + _P6) * t + _P5
    series = ((((high * t + _P4) * t + _P3) * t + _P2) * t + _P1) * t
    bell = exp(-_HALF * g * g)
    tail = bell * series
    return (tail if g < f32(0) else f32(1) - tail), bell


@numba_glue.jit
def _sigmoid(x):
    return f32(1) / (f32(1) + exp(-x))


def share(g, act):
    """act(g) / g."""


@overload(share)
def _share(g, act):
    return {
        types.int8: lambda g, act: _sigmoid(g),
        types.int16: lambda g, act: _sigmoid(g * (_LINEAR + _CUBIC * g * g)),
        types.int32: lambda g, act: _normal(g)[0],
    }[act]


def share_and_slope(g, act):
    """act(g) / g and act'(g)."""


@numba_glue.jit
def _silu(g):
    s = _sigmoid(g)
    return s, s * (f32(1) + g * (f32(1) - s))


@numba_glue.jit
def _gelu_tanh(g):
    s = _sigmoid(g * (_LINEAR + _CUBIC * g * g))
    return s, s * (f32(1) + g * (f32(1) - s) * (_LINEAR + _CUBIC_SLOPE * g * g))


@numba_glue.jit
def _gelu(g):
    below, bell = _normal(g)
    return below, below + g * _DENSITY * bell


@overload(share_and_slope)
def _share_and_slope(g, act):
    of = {types.int8: _silu, types.int16: _gelu_tanh, types.int32: _gelu}[act]
    return lambda g, act: of(g)


@numba_glue.jit
def _row(row, gate, up, y, gate_stride, up_stride, up_start, n, act, dtype):
    gate, up, y = at(gate, row * gate_stride, dtype), at(up, row * up_stride + up_start, dtype), at(y, row * n, dtype)
    for j in range(n):
        g = load(gate, j, dtype)
        store(y, j, g * share(g, act) * load(up, j, dtype), dtype)


@numba_glue.kernel
def _gated(threads, gate, up, y, gate_stride, up_stride, up_start, m, n, act, dtype):
    if threads > 1:
        for i in prange(m):  # it counts unsigned, and unsigned times signed is a float
            _row(np.int64(i), gate, up, y, gate_stride, up_stride, up_start, n, act, dtype)
    else:
        for i in range(m):
            _row(i, gate, up, y, gate_stride, up_stride, up_start, n, act, dtype)


@numba_glue.jit
def _row_backward(row, tensors, strides, up_start, dup_start, n, act, dtype):
    dy, gate, up, dgate, dup = tensors
    dy_stride, gate_stride, up_stride, d_stride = strides
    dy, gate = at(dy, row * dy_stride, dtype), at(gate, row * gate_stride, dtype)
    up, dgate = at(up, row * up_stride + up_start, dtype), at(dgate, row * d_stride, dtype)
    dup = at(dup, row * d_stride + dup_start, dtype)
    for j in range(n):
        d, g = load(dy, j, dtype), load(gate, j, dtype)
        s, slope = share_and_slope(g, act)
        store(dgate, j, d * load(up, j, dtype) * slope, dtype)
        store(dup, j, d * g * s, dtype)


@numba_glue.kernel
def _gated_backward(
    threads, dy, gate, up, dgate, dup,
    dy_stride, gate_stride, up_stride, up_start, d_stride, dup_start, m, n, act, dtype,
):  # fmt: skip
    tensors, strides = (dy, gate, up, dgate, dup), (dy_stride, gate_stride, up_stride, d_stride)
    if threads > 1:
        for i in prange(m):
            _row_backward(np.int64(i), tensors, strides, up_start, dup_start, n, act, dtype)
    else:
        for i in range(m):
            _row_backward(i, tensors, strides, up_start, dup_start, n, act, dtype)


def _forward(outs, gate, up, act="silu"):
    """Kernel and launch arguments; of tensors for a launch and of specs for a compile."""
    m, n, stride = rows(gate)
    if up is None:
        n //= 2
        return _gated, (gate, gate, outs[0]), stride, stride, n, m, n, ACTS[act]
    return _gated, (gate, up, outs[0]), stride, rows(up).stride, 0, m, n, ACTS[act]


def _backward(outs, dy, gate, up, act="silu"):
    m, n, stride = rows(gate)
    strides = rows(dy).stride, stride, rows(up).stride
    return _gated_backward, (dy, gate, up, *outs), *strides, 0, n, 0, m, n, ACTS[act]


def _packed_backward(outs, dy, x, act="silu"):
    (m, n, dy_stride), stride, dx = rows(dy), rows(x).stride, outs[0]
    return _gated_backward, (dy, x, x, dx, dx), dy_stride, stride, stride, n, 2 * n, n, m, n, ACTS[act]


def _compile(call, outputs):
    def compile(specs, config: Config, arch: str) -> Artifact:
        return numba_glue.legacy_compile(*call(outputs(*specs), *specs))

    return compile


def _run(call):
    def run(outs, args, config: Config) -> None:
        kernel, *arguments = call(outs, *args)
        numba_glue.legacy_launch(kernel, config.parallel, *arguments)

    return run


compile, run = _compile(_forward, gated.outputs), _run(_forward)
compile_backward, run_backward = _compile(_backward, gated.outputs_backward), _run(_backward)
compile_packed_backward = _compile(_packed_backward, gated.outputs_packed_backward)
run_packed_backward = _run(_packed_backward)
