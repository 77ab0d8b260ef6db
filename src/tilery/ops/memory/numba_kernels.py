"""dropout, embedding and transpose in Numba: rows, or strips of rows, in parallel over the cores."""

from math import prod
from typing import Any

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic

from tilery.base.launch import Launch
from tilery.base.rows import rows
from tilery.base.spec import TensorSpec
from tilery.core.call import Call
from tilery.languages import numba_stream
from tilery.languages.numba_elements import STORAGE, ZERO, at, f32, integer, load, move, store
from tilery.languages.numba_glue import jit, kernel
from tilery.languages.numba_stream import LINE, finish, store_past, too_large
from tilery.ops.memory import philox
from tilery.ops.memory.numba_philox import words
from tilery.ops.rows.numba_rows import Config, NumbaRows

# dropout: four neighbours share a counter of Philox, but for the ends of a row

_BYTE, _STEP = np.uint32(8), f32(2.0**-24)


@jit
def _uniform(word):
    return f32(np.int32(word >> _BYTE)) * _STEP


@jit
def _uniforms(counter, key0, key1):
    """The four numbers of a counter, in [0, 1)."""
    w0, w1, w2, w3 = words(key0, key1, counter, counter >> 32)
    return _uniform(w0), _uniform(w1), _uniform(w2), _uniform(w3)


@jit
def _drop(x, y, j, uniform, p, scale, dtype):
    value = load(x, j, dtype) * scale
    store(y, j, value if uniform >= p else f32(0), dtype)


@jit
def _drop_each(x, y, first, start, stop, key0, key1, p, scale, dtype):
    """Elements `start` to `stop` of a row whose first element is number `first`, one by one."""
    for j in range(start, stop):
        u0, u1, u2, u3 = _uniforms((first + j) // 4, key0, key1)
        lane = (first + j) % 4
        uniform = (u0 if lane == 0 else u1) if lane < 2 else (u2 if lane == 2 else u3)
        _drop(x, y, j, uniform, p, scale, dtype)


@jit
def _drop_row(row, x, y, x_stride, n, key0, key1, p, scale, dtype):
    first = row * n
    x, y = at(x, row * x_stride, dtype), at(y, first, dtype)
    head = min(-first % 4, n)
    quads = (n - head) // 4
    _drop_each(x, y, first, ZERO, head, key0, key1, p, scale, dtype)
    x_quads, y_quads, counter = at(x, head, dtype), at(y, head, dtype), (first + head) // 4
    for q in range(quads):
        u0, u1, u2, u3 = _uniforms(counter + q, key0, key1)
        _drop(x_quads, y_quads, 4 * q, u0, p, scale, dtype)
        _drop(x_quads, y_quads, 4 * q + 1, u1, p, scale, dtype)
        _drop(x_quads, y_quads, 4 * q + 2, u2, p, scale, dtype)
        _drop(x_quads, y_quads, 4 * q + 3, u3, p, scale, dtype)
    _drop_each(x, y, first, head + 4 * quads, n, key0, key1, p, scale, dtype)


@kernel
def _dropout(threads, x, y, x_stride, m, n, key0, key1, p, scale, dtype):
    p, scale = f32(p), f32(scale)
    if threads > 1:
        for i in prange(m):  # it counts unsigned, and unsigned times signed is a float
            _drop_row(np.int64(i), x, y, x_stride, n, key0, key1, p, scale, dtype)
    else:
        for i in range(m):
            _drop_row(i, x, y, x_stride, n, key0, key1, p, scale, dtype)


class Dropout(NumbaRows):
    least = 2**14

    def launches(self, call: Call, config: Config) -> list[Launch]:
        m, n, stride = rows(call.x)
        args = {"x": call.x, "y": call.y, "x_stride": stride, "m": m, "n": n}
        args |= {"key0": call.seed.then(philox.low_key), "key1": call.seed.then(philox.high_key)}
        args |= {"p": call.p, "scale": call.scale, "dtype": STORAGE[call.x.dtype]}
        return [Launch(_dropout, 1, args, options={"parallel": config.parallel})]


dropout = Dropout()

# embedding


@jit
def _copy_row(row, table, ids, y, t_stride, v, n, size, dtype):
    index = integer(ids, row, size)
    y = at(y, row * n, dtype)
    if 0 <= index < v:
        found = at(table, index * t_stride, dtype)
        for j in range(n):
            move(found, j, y, j, dtype)
    else:
        for j in range(n):
            store(y, j, f32(np.nan), dtype)


@kernel
def _embedding(threads, table, ids, y, t_stride, m, v, n, size, dtype):
    """size: bytes of an id."""
    if threads > 1:
        for i in prange(m):
            _copy_row(np.int64(i), table, ids, y, t_stride, v, n, size, dtype)
    else:
        for i in range(m):
            _copy_row(i, table, ids, y, t_stride, v, n, size, dtype)


class Embedding(NumbaRows):
    least = 2**16

    def rows_of(self, call: Call) -> TensorSpec:
        found: TensorSpec = call.y
        return found

    def launches(self, call: Call, config: Config) -> list[Launch]:
        v, n = call.table.shape
        args = {"table": call.table, "ids": call.ids, "y": call.y, "t_stride": call.table.stride(0)}
        args |= {"m": prod(call.ids.shape), "v": v, "n": n, "size": call.ids.dtype.itemsize}
        args |= {"dtype": STORAGE[call.table.dtype]}
        return [Launch(_embedding, 1, args, options={"parallel": config.parallel})]


embedding = Embedding()

# transpose: strips of rows, each in squares that are transposed in registers

_MOST = 32  # rows of a square: as many vectors as AVX-512 has registers
_WIDE = 512  # columns that a core takes at a time
_I32, _I64 = ir.IntType(32), ir.IntType(64)


def _side(dtype: types.Type) -> int:
    """Rows and columns of a square: a row is a line of the cache, but for fp8."""
    return min(_MOST, LINE // (dtype.bitwidth // 8))


def _turning(past: bool) -> Any:
    """What transposes a square in registers, y = xᵀ; `past`: y is written past the caches, see numba_stream."""

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
            vectors = [builder.load(row(x, x_stride, i), align=size) for i in range(side)]
            for _ in range(side.bit_length() - 1):  # each zips the upper half with the lower: at last it is transposed
                pairs = zip(vectors[: side // 2], vectors[side // 2 :])
                vectors = [zipped(a, b, half) for a, b in pairs for half in (0, 1)]
            for i, made in enumerate(vectors):
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


@jit
def _edge(x, y, height, width, x_stride, y_stride, dtype):
    for i in range(height):
        for j in range(width):
            move(x, i * x_stride + j, y, j * y_stride + i, dtype)


@jit
def _transpose_strip(x, y, height, width, x_stride, y_stride, past, dtype):
    """A strip, which is one square high: its rows become columns."""
    side = _square(dtype)
    for j in range(0, width, side):
        x_square, y_square = at(x, j, dtype), at(y, j * y_stride, dtype)
        if height < side or width - j < side:
            _edge(x_square, y_square, height, min(side, width - j), x_stride, y_stride, dtype)
        elif past:
            _turn_past(x_square, y_square, x_stride, y_stride, dtype)
        else:
            _turn(x_square, y_square, x_stride, y_stride, dtype)


@jit
def _transpose_strips(first, last, x, y, x_stride, m, n, past, dtype):
    """Strips `first` to `last`, of _WIDE columns each; they are numbered from left to right, down, and by matrix."""
    side = _square(dtype)
    high, wide = (m + side - 1) // side, (n + _WIDE - 1) // _WIDE
    for strip in range(first, last):
        batch, i, j = strip // (high * wide), strip // wide % high * side, strip % wide * _WIDE
        source, target = at(x, (batch * m + i) * x_stride + j, dtype), at(y, (batch * n + j) * m + i, dtype)
        _transpose_strip(source, target, min(side, m - i), min(_WIDE, n - j), x_stride, m, past, dtype)
    if past:
        finish()


@kernel
def _transpose(threads, x, y, x_stride, batch, m, n, least, dtype):
    side = _square(dtype)
    strips = batch * ((m + side - 1) // side) * ((n + _WIDE - 1) // _WIDE)
    past = at(0, side, dtype) == LINE and too_large(y, batch * n, m, least, dtype)
    if threads > 1:
        for i in prange(threads):
            part = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            first, last = part * strips // threads, (part + 1) * strips // threads
            _transpose_strips(first, last, x, y, x_stride, m, n, past, dtype)
    else:
        _transpose_strips(ZERO, strips, x, y, x_stride, m, n, past, dtype)


class Transpose(NumbaRows):
    least = 2**16

    def launches(self, call: Call, config: Config) -> list[Launch]:
        (count, n, stride), m = rows(call.x), call.x.shape[-2]
        args = {"x": call.x, "y": call.y, "x_stride": stride, "batch": count // max(m, 1), "m": m, "n": n}
        args |= {"least": numba_stream.LEAST, "dtype": STORAGE[call.x.dtype]}
        return [Launch(_transpose, 1, args, options={"parallel": config.parallel})]


transpose = Transpose()
