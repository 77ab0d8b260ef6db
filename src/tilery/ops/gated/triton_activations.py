"""SiLU and GELU in Triton kernels, as activations.py defines them."""

import triton
import triton.language as tl

from tilery.ops.gated.activations import CUBIC, DENSITY, LINEAR, RATE, TAIL

_LINEAR, _CUBIC, _RATE, _DENSITY = map(tl.constexpr, (LINEAR, CUBIC, RATE, DENSITY))
_P1, _P2, _P3, _P4, _P5, _P6, _P7, _P8, _P9 = map(tl.constexpr, TAIL)


@triton.jit
def _normal(g):
    """The normal distribution's share below g, and exp(-g²/2)."""
    t = 1 / (1 + _RATE * tl.abs(g))
    high = (((_P9 * t + _P8) * t + _P7) * t + _P6) * t + _P5
    series = ((((high * t + _P4) * t + _P3) * t + _P2) * t + _P1) * t
    bell = tl.exp(-0.5 * g * g)
    return tl.where(g < 0, bell * series, 1 - bell * series), bell


@triton.jit
def factor(g, ACT: tl.constexpr):
    """act(g) / g."""
    if ACT == "none":
        below, _ = _normal(g)
        return below
    return 1 / (1 + tl.exp(-g if ACT == "silu" else -g * (_LINEAR + _CUBIC * g * g)))


@triton.jit
def activated(g, ACT: tl.constexpr):
    """act(g)."""
    return g * factor(g, ACT)


@triton.jit
def factor_and_slope(g, ACT: tl.constexpr):
    """act(g) / g and act'(g)."""
    if ACT == "none":
        below, bell = _normal(g)
        return below, below + g * _DENSITY * bell
    s = factor(g, ACT)
    inner = g * (1 - s) if ACT == "silu" else g * (1 - s) * (_LINEAR + 3 * _CUBIC * g * g)
    return s, s * (1 + inner)
