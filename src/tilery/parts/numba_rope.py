"""Numba kernels that turn heads: tokens in parallel over the cores, each head turned in fp32 on its way."""

from typing import Any, NamedTuple

import numpy as np
from numba import prange

from tilery.base.spec import Artifact, TensorSpec
from tilery.languages import numba_elements, numba_glue
from tilery.languages.numba_elements import FP32, STORAGE, at, f32, integer, load, store
from tilery.parts.heads import heads
from tilery.parts.numba_rows import Config

archs = ("cpu",)
_NAN = f32(np.nan)


def refusal(q: TensorSpec) -> str | None:
    return numba_elements.refusal(q)


def default(q: TensorSpec, layout: str) -> Config:
    batch, tokens, count, size, _ = heads(q, layout)
    return Config(parallel=batch * tokens > 1 and batch * tokens * count * size >= 2**16)


@numba_glue.jit
def fetch(x, y, size, dtype):
    """Copies a head to fp32: were it turned on the way, LLVM could not tell whether x and y overlap."""
    for i in range(size):
        store(y, i, load(x, i, dtype), FP32)


@numba_glue.jit
def _normalise(y, weight, size, norm, dtype):
    squares = f32(0)
    for i in range(size):
        value = load(y, i, FP32)
        squares += value * value
    scale = f32(1) / np.sqrt(squares / f32(size) + f32(norm.eps))
    for i in range(size):
        store(y, i, load(y, i, FP32) * scale * (load(weight, i, dtype) + f32(norm.offset)), FP32)


class Turn(NamedTuple):
    """How heads are turned, for Numba."""

    half: int
    table: int  # rows of cos and sin
    cos_stride: int
    sin_stride: int
    position_bytes: int  # 0: a token's position is its place in the sequence
    interleaved: bool
    sign: float  # of the angle


def how(cos: Any, sin: Any, positions: Any, interleaved: bool, inverse: bool = False) -> Turn:
    size = 0 if positions is None else positions.dtype.itemsize
    return Turn(cos.shape[1], cos.shape[0], cos.stride(0), sin.stride(0), size, interleaved, -1.0 if inverse else 1.0)


@numba_glue.jit
def row(cos, sin, positions, token, place, by, angle):
    """Where the angles of a token are, and whether they are."""
    position = place
    if by.position_bytes:
        position = integer(positions, token, by.position_bytes)
    known = 0 <= position < by.table
    position = position if known else 0
    return at(cos, position * by.cos_stride, angle), at(sin, position * by.sin_stride, angle), known


@numba_glue.jit
def turn(y, cos, sin, known, by, angle):
    """A head of fp32 in place; NaN where there are no angles for it."""
    sign, half = f32(by.sign), by.half
    if not known:
        for i in range(2 * half):
            store(y, i, _NAN, FP32)
    elif by.interleaved:
        for i in range(half):
            c, s = load(cos, i, angle), sign * load(sin, i, angle)
            a, b = load(y, 2 * i, FP32), load(y, 2 * i + 1, FP32)
            store(y, 2 * i, a * c - b * s, FP32)
            store(y, 2 * i + 1, b * c + a * s, FP32)
    else:
        for i in range(half):
            c, s = load(cos, i, angle), sign * load(sin, i, angle)
            a, b = load(y, i, FP32), load(y, i + half, FP32)
            store(y, i, a * c - b * s, FP32)
            store(y, i + half, b * c + a * s, FP32)


class Norm(NamedTuple):
    """What heads are normed with before they are turned, for Numba."""

    there: bool = False
    eps: float = 0.0
    offset: float = 0.0


NO_NORM = Norm()


@numba_glue.jit
def turn_heads(x, y, weight, x_head, y_head, count, moved, cos, sin, known, by, norm, angle, dtype):
    """All heads of one token, of each the first `moved` values."""
    scratch = np.empty(moved, np.float32)
    values = scratch.ctypes.data
    for h in range(count):
        source, target = at(x, h * x_head, dtype), at(y, h * y_head, dtype)
        fetch(source, values, moved, dtype)
        if norm.there:
            _normalise(values, weight, moved, norm, dtype)
        turn(values, cos, sin, known, by, angle)
        for i in range(moved):
            store(target, i, load(values, i, FP32), dtype)


@numba_glue.jit
def _token(token, q, k, cos, sin, positions, weights, q_out, k_out, tokens, moved, q_as, k_as, by, norm, angle, dtype):
    """q_as and k_as hold the number of heads, then strides of batch, token and head, of what is read and written."""
    b, s = token // tokens, token % tokens
    c, d, known = row(cos, sin, positions, token, s, by, angle)
    count, x_b, x_s, x_h, y_b, y_s, y_h = q_as
    x, y = at(q, b * x_b + s * x_s, dtype), at(q_out, b * y_b + s * y_s, dtype)
    turn_heads(x, y, weights[0], x_h, y_h, count, moved, c, d, known, by, norm, angle, dtype)
    count, x_b, x_s, x_h, y_b, y_s, y_h = k_as
    x, y = at(k, b * x_b + s * x_s, dtype), at(k_out, b * y_b + s * y_s, dtype)
    turn_heads(x, y, weights[1], x_h, y_h, count, moved, c, d, known, by, norm, angle, dtype)


@numba_glue.kernel
def _rope(
    threads, q, k, cos, sin, positions, q_weight, k_weight, q_out, k_out,
    batch, tokens, moved, q_as, k_as, by, norm, angle, dtype,
):  # fmt: skip
    weights = (q_weight, k_weight)
    if threads > 1:
        for i in prange(batch * tokens):
            token = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            _token(
                token, q, k, cos, sin, positions, weights,
                q_out, k_out, tokens, moved, q_as, k_as, by, norm, angle, dtype,
            )  # fmt: skip
    else:
        for token in range(batch * tokens):
            _token(
                token, q, k, cos, sin, positions, weights,
                q_out, k_out, tokens, moved, q_as, k_as, by, norm, angle, dtype,
            )  # fmt: skip


def _arguments(outs: Any, args: Any, inverse: bool, weights: Any, norm: Norm) -> tuple[Any, ...]:
    """The launch arguments, of tensors for a run and of specs for a compile; outs None where it is in place."""
    q, k, cos, sin, positions, layout, interleaved = args
    outs = outs or (q, k)
    q_as, k_as, *outs_as = (heads(x, layout) for x in (q, k, *outs))
    shapes = [(x.heads, *x.strides, *y.strides) for x, y in zip((q_as, k_as), outs_as)]
    whole = outs[0] is not q or norm.there  # else what is not turned stays where it is
    # What is not there is not read: any address will do.
    tensors = (q, k, cos, sin, cos if positions is None else positions, *(weights or (q, k)), *outs)
    by = how(cos, sin, positions, interleaved, inverse)
    moved = q_as.size if whole else 2 * by.half
    return tensors, q_as.batch, q_as.tokens, moved, *shapes, by, norm, STORAGE[cos.dtype]


def run(config: Config, outs: Any, args: Any, inverse: bool = False, weights: Any = None, norm: Norm = NO_NORM) -> None:
    numba_glue.legacy_launch(_rope, config.parallel, *_arguments(outs, args, inverse, weights, norm))


def compile(outs: Any, specs: Any, inverse: bool = False, weights: Any = None, norm: Norm = NO_NORM) -> Artifact:
    return numba_glue.legacy_compile(_rope, *_arguments(outs, specs, inverse, weights, norm))
