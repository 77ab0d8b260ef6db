"""Bands of rows in parallel over the cores, each in squares that are turned in registers."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic

from tilery.base.spec import Artifact, TensorSpec
from tilery.languages import numba_glue
from tilery.languages.numba_elements import ZERO, at, move
from tilery.ops.transpose import outputs
from tilery.parts import numba_rows, numba_stream
from tilery.parts.numba_rows import Config, archs
from tilery.parts.numba_stream import LINE, finish, store_past, too_large
from tilery.parts.rows import rows

__all__ = ["Config", "archs", "compile", "configs", "default", "refusal", "run"]

_MOST = 32  # rows of a square: as many vectors as AVX-512 has registers
_WIDE = 512  # columns that a core takes at a time
_I32, _I64 = ir.IntType(32), ir.IntType(64)


def refusal(x: TensorSpec, config: Config | None = None) -> str | None:
    return numba_rows.refusal(x)


def default(x: TensorSpec) -> Config:
    return numba_rows.default(x, least=2**16)


def configs(x: TensorSpec) -> list[Config]:
    return numba_rows.configs()


def _side(dtype: types.Type) -> int:
    """A row of a square is a line of the cache, but for fp8."""
    return min(_MOST, LINE // (dtype.bitwidth // 8))


def _turning(past: bool) -> Any:
    """Makes y = xᵀ of squares, in registers; `past`: the caches, see numba_stream."""

    @intrinsic
    def turn(typing, x, y, x_stride, y_stride, dtype):
        size, side = dtype.bitwidth // 8, _side(dtype)
        vector = ir.VectorType(ir.IntType(dtype.bitwidth), side)

        def generate(context, builder, signature, args):
            def row(address, stride, i):
                start = builder.add(address, builder.mul(stride, _I64(i * size)))
                return builder.inttoptr(start, vector.as_pointer())

            def zipped(a, b, half):
                order = [half * side // 2 + i // 2 + i % 2 * side for i in range(side)]
                return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, side), order))

            x, y, x_stride, y_stride, _ = args
            rows = [builder.load(row(x, x_stride, i), align=size) for i in range(side)]
            for _ in range(side.bit_length() - 1):  # each zips the upper half with the lower: after all it is turned
                pairs = zip(rows[: side // 2], rows[side // 2 :])
                rows = [zipped(a, b, half) for a, b in pairs for half in (0, 1)]
            for i, made in enumerate(rows):
                if past:
                    store_past(builder, made, row(y, y_stride, i))
                else:
                    builder.store(made, row(y, y_stride, i), align=size)

        return types.void(types.int64, types.int64, types.int64, types.int64, dtype), generate

    return turn


_turn, _turn_past = _turning(False), _turning(True)


@intrinsic
def _square(typing, dtype):
    return types.int64(dtype), lambda context, builder, signature, args: _I64(_side(dtype))


@numba_glue.jit
def _edge(x, y, height, width, x_stride, y_stride, dtype):
    for i in range(height):
        for j in range(width):
            move(x, i * x_stride + j, y, j * y_stride + i, dtype)


@numba_glue.jit
def _band(x, y, height, width, x_stride, y_stride, past, dtype):
    """Rows of one square's height become columns."""
    side = _square(dtype)
    for j in range(0, width, side):
        x_square, y_square = at(x, j, dtype), at(y, j * y_stride, dtype)
        if height < side or width - j < side:
            _edge(x_square, y_square, height, min(side, width - j), x_stride, y_stride, dtype)
        elif past:
            _turn_past(x_square, y_square, x_stride, y_stride, dtype)
        else:
            _turn(x_square, y_square, x_stride, y_stride, dtype)


@numba_glue.jit
def _bands(first, last, x, y, x_stride, m, n, past, dtype):
    """Those from `first` to `last`, of _WIDE columns each, row by row of bands and matrix by matrix."""
    side = _square(dtype)
    high, wide = (m + side - 1) // side, (n + _WIDE - 1) // _WIDE
    for band in range(first, last):
        batch, i, j = band // (high * wide), band // wide % high * side, band % wide * _WIDE
        source, target = at(x, (batch * m + i) * x_stride + j, dtype), at(y, (batch * n + j) * m + i, dtype)
        _band(source, target, min(side, m - i), min(_WIDE, n - j), x_stride, m, past, dtype)
    if past:
        finish()


@numba_glue.kernel
def _transpose(threads, x, y, x_stride, batch, m, n, least, dtype):
    side = _square(dtype)
    bands = batch * ((m + side - 1) // side) * ((n + _WIDE - 1) // _WIDE)
    past = at(0, side, dtype) == LINE and too_large(y, batch * n, m, least, dtype)
    if threads > 1:
        for i in prange(threads):
            part = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            _bands(part * bands // threads, (part + 1) * bands // threads, x, y, x_stride, m, n, past, dtype)
    else:
        _bands(ZERO, bands, x, y, x_stride, m, n, past, dtype)


def _arguments(outs, x):
    """The launch arguments, of tensors for `run` and of specs for `compile`."""
    (count, n, stride), m = rows(x), x.shape[-2]
    return (x, outs[0]), stride, count // max(m, 1), m, n, numba_stream.LEAST


def compile(specs, config: Config, arch: str) -> Artifact:
    return numba_glue.legacy_compile(_transpose, *_arguments(outputs(*specs), *specs))


def run(outs, args, config: Config) -> None:
    numba_glue.legacy_launch(_transpose, config.parallel, *_arguments(outs, *args))
