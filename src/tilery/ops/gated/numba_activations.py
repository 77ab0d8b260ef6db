"""SiLU and GELU in Numba kernels, as activations.py defines them."""

import numpy as np
from numba import types
from numba.extending import overload

from tilery.languages.numba_elements import exp, f32
from tilery.languages.numba_glue import jit
from tilery.ops.gated.activations import CUBIC, DENSITY, LINEAR, RATE, TAIL

# A number whose type says which activation it is, so that each is compiled for itself.
ACTS = {"silu": np.int8(0), "tanh": np.int16(0), "none": np.int32(0)}

_LINEAR, _CUBIC, _CUBIC_SLOPE = f32(LINEAR), f32(CUBIC), f32(3 * CUBIC)
_RATE, _DENSITY, _HALF = f32(RATE), f32(DENSITY), f32(0.5)
_P1, _P2, _P3, _P4, _P5, _P6, _P7, _P8, _P9 = map(f32, TAIL)


@jit
def _normal(g):
    """The normal distribution's share below g, and exp(-g²/2)."""
    t = f32(1) / (f32(1) + _RATE * abs(g))
    high = (((_P9 * t + _P8) * t + _P7) * t + _P6) * t + _P5
    series = ((((high * t + _P4) * t + _P3) * t + _P2) * t + _P1) * t
    bell = exp(-_HALF * g * g)
    tail = bell * series
    return (tail if g < f32(0) else f32(1) - tail), bell


@jit
def _sigmoid(x):
    return f32(1) / (f32(1) + exp(-x))


def factor(g, act):
    """act(g) / g."""


@overload(factor)
def _factor(g, act):
    return {
        types.int8: lambda g, act: _sigmoid(g),
        types.int16: lambda g, act: _sigmoid(g * (_LINEAR + _CUBIC * g * g)),
        types.int32: lambda g, act: _normal(g)[0],
    }[act]


@jit
def activated(g, act):
    """act(g)."""
    return g * factor(g, act)


def factor_and_slope(g, act):
    """act(g) / g and act'(g)."""


@jit
def _silu(g):
    s = _sigmoid(g)
    return s, s * (f32(1) + g * (f32(1) - s))


@jit
def _gelu_tanh(g):
    s = _sigmoid(g * (_LINEAR + _CUBIC * g * g))
    return s, s * (f32(1) + g * (f32(1) - s) * (_LINEAR + _CUBIC_SLOPE * g * g))


@jit
def _gelu(g):
    below, bell = _normal(g)
    return below, below + g * _DENSITY * bell


@overload(factor_and_slope)
def _factor_and_slope(g, act):
    of = {types.int8: _silu, types.int16: _gelu_tanh, types.int32: _gelu}[act]
    return lambda g, act: of(g)
