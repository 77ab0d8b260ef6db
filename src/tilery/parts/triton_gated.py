"""Gated activations in Triton: y = act(gate) · up, and the gradients of gate and up."""

import triton
import triton.language as tl

from tilery.base.spec import Artifact, TensorSpec
from tilery.languages import triton_glue
from tilery.languages.triton_glue import hand_over, take_over
from tilery.parts import gated, triton_pieces
from tilery.parts.rows import joined, rows
from tilery.parts.triton_pieces import Config, archs, piece

__all__ = ["Config", "archs", "compile", "configs", "default", "refusal", "run"]

_LINEAR, _CUBIC, _RATE, _DENSITY = map(tl.constexpr, (gated.LINEAR, gated.CUBIC, gated.RATE, gated.DENSITY))
_P1, _P2, _P3, _P4, _P5, _P6, _P7, _P8, _P9 = map(tl.constexpr, gated.TAIL)


def refusal(*specs, config: Config | None = None) -> str | None:
    return None


def default(first: TensorSpec, *_) -> Config:
    return triton_pieces.default(first.shape[-1])


def configs(*specs) -> list[Config]:
    return triton_pieces.configs()


@triton.jit
def _normal(g):
    """The normal distribution's share below g, and exp(-g²/2)."""
    t = 1 / (1 + _RATE * tl.abs(g))
    high = (((_P9 * t + _P8) * t + _P7) * t + _P6) * t + _P5
    series = ((((high * t + _P4) * t + _P3) * t + _P2) * t + _P1) * t
    bell = tl.exp(-0.5 * g * g)
    return tl.where(g < 0, bell * series, 1 - bell * series), bell


@triton.jit
def share(g, ACT: tl.constexpr):
    """act(g) / g."""
    if ACT == "none":
        below, _ = _normal(g)
        return below
    return 1 / (1 + tl.exp(-g if ACT == "silu" else -g * (_LINEAR + _CUBIC * g * g)))


@triton.jit
def _share_and_slope(g, ACT: tl.constexpr):
    """act(g) / g and act'(g)."""
    if ACT == "none":
        below, bell = _normal(g)
        return below, below + g * _DENSITY * bell
    s = share(g, ACT)
    inner = g * (1 - s) if ACT == "silu" else g * (1 - s) * (_LINEAR + 3 * _CUBIC * g * g)
    return s, s * (1 + inner)


@triton_glue.early
@triton.jit
def _gated(
    g_ptr, u_ptr, y_ptr, g_stride, u_stride, u_start, n,
    ACT: tl.constexpr, BLOCK: tl.constexpr, PLACE: tl.constexpr,
):  # fmt: skip
    take_over()
    hand_over()
    row, start, cols, mask = piece(n, BLOCK, PLACE)
    g = tl.load(g_ptr + row * g_stride + start + cols, mask=mask).to(tl.float32)
    u = tl.load(u_ptr + row * u_stride + u_start + start + cols, mask=mask).to(tl.float32)
    tl.store(y_ptr + row * n + start + cols, g * share(g, ACT) * u, mask=mask)


@triton_glue.early
@triton.jit
def _gated_backward(
    dy_ptr, g_ptr, u_ptr, dg_ptr, du_ptr,
    dy_stride, g_stride, u_stride, u_start, d_stride, du_start, n,
    ACT: tl.constexpr, BLOCK: tl.constexpr, PLACE: tl.constexpr,
):  # fmt: skip
    take_over()
    hand_over()
    row, start, cols, mask = piece(n, BLOCK, PLACE)
    dy = tl.load(dy_ptr + row * dy_stride + start + cols, mask=mask).to(tl.float32)
    g = tl.load(g_ptr + row * g_stride + start + cols, mask=mask).to(tl.float32)
    u = tl.load(u_ptr + row * u_stride + u_start + start + cols, mask=mask).to(tl.float32)
    s, slope = _share_and_slope(g, ACT)
    tl.store(dg_ptr + row * d_stride + start + cols, dy * u * slope, mask=mask)
    tl.store(du_ptr + row * d_stride + du_start + start + cols, dy * g * s, mask=mask)


def _forward(outs, gate, up, act="silu"):
    """Kernel, rows, columns and launch arguments; of tensors for a launch and of specs for a compile."""
    if up is None:
        (m, n, stride), half = rows(gate), gate.shape[-1] // 2
        return _gated, m, half, act, (gate, gate, outs[0], stride, stride, half, half)
    m, n, *strides = joined(gate, up)
    return _gated, m, n, act, (gate, up, outs[0], *strides, 0, n)


def _backward(outs, dy, gate, up, act="silu"):
    m, n, *strides = joined(dy, gate, up)
    return _gated_backward, m, n, act, (dy, gate, up, *outs, *strides, 0, n if m > 1 else 0, 0, n)


def _packed_backward(outs, dy, x, act="silu"):
    (m, n, dy_stride), stride, dx = rows(dy), rows(x).stride, outs[0]
    return _gated_backward, m, n, act, (dy, x, x, dx, dx, dy_stride, stride, stride, n, 2 * n, n, n)


def _compile(call, outputs):
    def compile(specs, config: Config, arch: str) -> Artifact:
        kernel, m, n, act, arguments = call(outputs(*specs), *specs)
        constants = triton_pieces.cut(m, n, config)[1] | {"ACT": act}
        return triton_glue.legacy_compile(kernel, arguments, constants, config.options, arch)

    return compile


def _run(call):
    def run(outs, args, config: Config) -> None:
        kernel, m, n, act, arguments = call(outs, *args)
        grid, constants = triton_pieces.cut(m, n, config)
        triton_glue.legacy_launch(kernel, grid, arguments, constants | {"ACT": act}, config.options)

    return run


compile, run = _compile(_forward, gated.outputs), _run(_forward)
compile_backward, run_backward = _compile(_backward, gated.outputs_backward), _run(_backward)
compile_packed_backward = _compile(_packed_backward, gated.outputs_packed_backward)
run_packed_backward = _run(_packed_backward)
