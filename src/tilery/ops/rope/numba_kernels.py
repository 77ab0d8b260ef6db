"""Rotary ops in Numba: tokens in parallel over the cores. A head is normed and rotated in the L1 cache, in fp32."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numba import prange

from tilery.base.launch import Launch
from tilery.base.spec import TensorSpec
from tilery.languages.numba_elements import FP32, STORAGE, at, f32, integer, load, store
from tilery.languages.numba_glue import jit, kernel
from tilery.ops.rope.call import CacheWriteCall, RopeCall, heads
from tilery.ops.rows.numba_rows import Config, NumbaRows

_NAN = f32(np.nan)


class RotaryKernel(NumbaRows):
    """Tokens are dealt out to all threads from `least` values of q on."""

    least = 2**16

    def rows_of(self, call: RopeCall) -> TensorSpec:
        return call.q

    def default(self, call: RopeCall) -> Config:
        values = call.tokens * call.q_heads.heads * call.q_heads.size
        return Config(parallel=call.tokens > 1 and values >= self.least)


# Rotation. Kernels take what is in these tuples, and make them: Numba compiles for each kind of tuple.


class Rotation(NamedTuple):
    """How heads are rotated."""

    half: int  # pairs of a head
    table: int  # rows of cos and sin
    cos_stride: int
    sin_stride: int
    position_bytes: int  # 0: a token's position is its place in the sequence
    interleaved: bool
    sign: float  # of the angle


class Norm(NamedTuple):
    """What heads are normed with before they are rotated, if they are."""

    there: bool
    eps: float
    offset: float


def _rotation(call: RopeCall, inverse: bool = False) -> tuple[Any, ...]:
    """Fields of a `Rotation`."""
    (table, half), size = call.cos.shape, 0 if call.positions is None else call.positions.dtype.itemsize
    sign = -1.0 if inverse else 1.0
    return half, table, call.cos.stride(0), call.sin.stride(0), size, call.interleaved, sign


@jit
def _fetch(x, y, size, dtype):
    """Copy a head to fp32: were it rotated on the way, LLVM could not tell whether x and y overlap."""
    for i in range(size):
        store(y, i, load(x, i, dtype), FP32)


@jit
def _normalize(y, weight, size, norm, dtype):
    squares = f32(0)
    for i in range(size):
        value = load(y, i, FP32)
        squares += value * value
    scale = f32(1) / np.sqrt(squares / f32(size) + f32(norm.eps))
    for i in range(size):
        store(y, i, load(y, i, FP32) * scale * (load(weight, i, dtype) + f32(norm.offset)), FP32)


@jit
def _angles(cos, sin, positions, token, place, by, angle_dtype):
    """Where the angles of a token are, and whether they are."""
    position = place
    if by.position_bytes:
        position = integer(positions, token, by.position_bytes)
    known = 0 <= position < by.table
    position = position if known else 0
    return at(cos, position * by.cos_stride, angle_dtype), at(sin, position * by.sin_stride, angle_dtype), known


@jit
def _rotate(y, cos, sin, known, by, angle_dtype):
    """Rotate a head of fp32 in place; NaN where there are no angles for it."""
    sign, half = f32(by.sign), by.half
    if not known:
        for i in range(2 * half):
            store(y, i, _NAN, FP32)
    elif by.interleaved:
        for i in range(half):
            c, s = load(cos, i, angle_dtype), sign * load(sin, i, angle_dtype)
            a, b = load(y, 2 * i, FP32), load(y, 2 * i + 1, FP32)
            store(y, 2 * i, a * c - b * s, FP32)
            store(y, 2 * i + 1, b * c + a * s, FP32)
    else:
        for i in range(half):
            c, s = load(cos, i, angle_dtype), sign * load(sin, i, angle_dtype)
            a, b = load(y, i, FP32), load(y, i + half, FP32)
            store(y, i, a * c - b * s, FP32)
            store(y, i + half, b * c + a * s, FP32)


@jit
def _rotate_heads(x, y, weight, x_head, y_head, count, moved, cos, sin, known, by, norm, angle_dtype, dtype):
    """All heads of one token, of each the first `moved` values."""
    scratch = np.empty(moved, np.float32)
    values = scratch.ctypes.data
    for h in range(count):
        source, target = at(x, h * x_head, dtype), at(y, h * y_head, dtype)
        _fetch(source, values, moved, dtype)
        if norm.there:
            _normalize(values, weight, moved, norm, dtype)
        _rotate(values, cos, sin, known, by, angle_dtype)
        for i in range(moved):
            store(target, i, load(values, i, FP32), dtype)


# rope, rope_, rope_backward and qk_norm_rope_: q and k in one pass


@jit
def _rope_token(
    token, q, k, q_out, k_out, cos, sin, positions, weights, tokens, moved, q_strides, k_strides, by, norm, angle_dtype,
    dtype,
):  # fmt: skip
    """q_strides and k_strides: the number of heads, then strides of sequence, token and head, read and written."""
    b, s = token // tokens, token % tokens
    c, d, known = _angles(cos, sin, positions, token, s, by, angle_dtype)
    count, x_b, x_s, x_h, y_b, y_s, y_h = q_strides
    x, y = at(q, b * x_b + s * x_s, dtype), at(q_out, b * y_b + s * y_s, dtype)
    _rotate_heads(x, y, weights[0], x_h, y_h, count, moved, c, d, known, by, norm, angle_dtype, dtype)
    count, x_b, x_s, x_h, y_b, y_s, y_h = k_strides
    x, y = at(k, b * x_b + s * x_s, dtype), at(k_out, b * y_b + s * y_s, dtype)
    _rotate_heads(x, y, weights[1], x_h, y_h, count, moved, c, d, known, by, norm, angle_dtype, dtype)


@kernel
def _rope(
    threads, q, k, q_out, k_out, cos, sin, positions, weights, shape, q_strides, k_strides, rotation, norm,
    angle_dtype, dtype,
):  # fmt: skip
    (batch, tokens, moved), by, normed = shape, Rotation(*rotation), Norm(*norm)
    if threads > 1:
        for i in prange(batch * tokens):
            token = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            _rope_token(
                token, q, k, q_out, k_out, cos, sin, positions, weights, tokens, moved, q_strides, k_strides, by,
                normed, angle_dtype, dtype,
            )  # fmt: skip
    else:
        for token in range(batch * tokens):
            _rope_token(
                token, q, k, q_out, k_out, cos, sin, positions, weights, tokens, moved, q_strides, k_strides, by,
                normed, angle_dtype, dtype,
            )  # fmt: skip


@dataclass(frozen=True)
class Rope(RotaryKernel):
    in_place: bool = False
    inverse: bool = False
    norm: bool = False

    def launches(self, call: RopeCall, config: Config) -> list[Launch]:
        q, k, layout = call.q_heads, call.k_heads, call.layout
        q_out, k_out = (call.q, call.k) if self.in_place else (call.q_out, call.k_out)
        whole = self.norm or not self.in_place  # else what is not rotated stays where it is
        args = {
            "q": call.q, "k": call.k, "q_out": q_out, "k_out": k_out, "cos": call.cos, "sin": call.sin,
            # What is not there is not read: any address will do.
            "positions": call.cos if call.positions is None else call.positions,
            "weights": (call.q_weight, call.k_weight) if self.norm else (call.q, call.k),
            "shape": (q.batch, q.tokens, q.size if whole else 2 * call.half),
            "q_strides": (q.heads, *q.strides, *heads(q_out, layout).strides),
            "k_strides": (k.heads, *k.strides, *heads(k_out, layout).strides),
            "rotation": _rotation(call, self.inverse),
            "norm": (True, call.eps, call.offset) if self.norm else (False, 0.0, 0.0),
            "angle_dtype": STORAGE[call.cos.dtype], "dtype": STORAGE[call.q.dtype],
        }  # fmt: skip
        return [Launch(_rope, 1, args, options={"parallel": config.parallel})]


rope, rope_, rope_backward = Rope(), Rope(in_place=True), Rope(inverse=True)
qk_norm_rope_ = Rope(in_place=True, norm=True)


# rope_cache_write_: a head is rotated and scaled on its way to the cache


@jit
def _write(values, y, size, scale, h, step, cache_dtype):
    """A head to the cache; step -1: there is no scale."""
    by = load(scale, h * step, FP32) if step >= 0 else f32(1)
    for i in range(size):
        store(y, i, load(values, i, FP32) / by, cache_dtype)


@jit
def _cache_token(
    token, q, k, v, caches, cos, sin, positions, slots, scales, scale_steps, shape, strides, cache, by, dtypes
):
    (k_cache, v_cache), (k_scale, v_scale), (k_step, v_step) = caches, scales, scale_steps
    _, q_heads, k_heads, size = shape
    q_token, q_head, k_token, k_head, v_token, v_head = strides
    slot_bytes, slots_end, block_size, c_block, c_token, c_head = cache
    dtype, angle_dtype, cache_dtype = dtypes
    c, s, known = _angles(cos, sin, positions, token, token, by, angle_dtype)
    x, plain = at(q, token * q_token, dtype), Norm(False, 0.0, 0.0)
    _rotate_heads(x, x, x, q_head, q_head, q_heads, 2 * by.half, c, s, known, by, plain, angle_dtype, dtype)
    slot = integer(slots, token, slot_bytes)
    if 0 <= slot < slots_end:
        scratch = np.empty(size, np.float32)
        values = scratch.ctypes.data
        place = slot // block_size * c_block + slot % block_size * c_token
        for h in range(k_heads):
            _fetch(at(k, token * k_token + h * k_head, dtype), values, size, dtype)
            _rotate(values, c, s, known, by, angle_dtype)
            _write(values, at(k_cache, place + h * c_head, cache_dtype), size, k_scale, h, k_step, cache_dtype)
            _fetch(at(v, token * v_token + h * v_head, dtype), values, size, dtype)
            _write(values, at(v_cache, place + h * c_head, cache_dtype), size, v_scale, h, v_step, cache_dtype)


@kernel
def _rope_cache_write(
    threads, q, k, v, caches, cos, sin, positions, slots, scales, scale_steps, shape, strides, cache, rotation,
    dtypes,
):  # fmt: skip
    tokens, by = shape[0], Rotation(*rotation)
    if threads > 1:
        for i in prange(tokens):
            token = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            _cache_token(
                token, q, k, v, caches, cos, sin, positions, slots, scales, scale_steps, shape, strides, cache, by,
                dtypes,
            )  # fmt: skip
    else:
        for token in range(tokens):
            _cache_token(
                token, q, k, v, caches, cos, sin, positions, slots, scales, scale_steps, shape, strides, cache, by,
                dtypes,
            )  # fmt: skip


class RopeCacheWrite(RotaryKernel):
    def launches(self, call: CacheWriteCall, config: Config) -> list[Launch]:
        q, k, v, k_cache = call.q, call.k, call.v, call.k_cache
        blocks, block_size, k_heads, size = k_cache.shape
        scales = (call.k_scale, call.v_scale)
        args = {
            "q": q, "k": k, "v": v, "caches": (k_cache, call.v_cache), "cos": call.cos, "sin": call.sin,
            "positions": call.positions, "slots": call.slots,
            # A scale that is not there is not read: any address will do.
            "scales": tuple(call.cos if scale is None else scale for scale in scales),
            "scale_steps": tuple(-1 if scale is None else int(scale.shape[0] > 1) for scale in scales),
            "shape": (call.tokens, call.q_heads.heads, k_heads, size),
            "strides": tuple(x.stride(d) for x in (q, k, v) for d in (0, 1)),
            "cache": (call.slots.dtype.itemsize, blocks * block_size, block_size, *k_cache.strides[:3]),
            "rotation": _rotation(call),
            "dtypes": (STORAGE[q.dtype], STORAGE[call.cos.dtype], STORAGE[k_cache.dtype]),
        }  # fmt: skip
        return [Launch(_rope_cache_write, 1, args, options={"parallel": config.parallel})]


rope_cache_write_ = RopeCacheWrite()
