"""Tokens in parallel over the cores; a head is turned and scaled in fp32 on its way to the cache."""

import numpy as np
from numba import prange

from tilery.base.spec import Artifact, TensorSpec
from tilery.languages import numba_glue
from tilery.languages.numba_elements import FP32, STORAGE, at, f32, integer, load, store
from tilery.parts import numba_rope, numba_rows
from tilery.parts.numba_rope import NO_NORM, fetch, row, turn, turn_heads
from tilery.parts.numba_rows import Config

archs = numba_rope.archs


def refusal(q: TensorSpec, *rest, config: Config | None = None) -> str | None:
    return numba_rope.refusal(q)


def default(q: TensorSpec, *rest) -> Config:
    return numba_rope.default(q, "thd")


def configs(*specs) -> list[Config]:
    return numba_rows.configs()


@numba_glue.jit
def _keep(values, y, size, scale, h, step, stored):
    """A head to the cache; step -1: there is no scale."""
    by = load(scale, h * step, FP32) if step >= 0 else f32(1)
    for i in range(size):
        store(y, i, load(values, i, FP32) / by, stored)


@numba_glue.jit
def _token(token, tensors, shape, strides, cache, scales, by, norm, stored, angle, dtype):
    q, k, v, k_cache, v_cache, cos, sin, positions, slots, k_scale, v_scale = tensors
    q_heads, k_heads, size = shape
    q_token, q_head, k_token, k_head, v_token, v_head = strides
    slot_bytes, slots_end, block_size, c_block, c_token, c_head = cache
    c, s, known = row(cos, sin, positions, token, token, by, angle)
    x = at(q, token * q_token, dtype)
    turn_heads(x, x, x, q_head, q_head, q_heads, 2 * by.half, c, s, known, by, norm, angle, dtype)
    slot = integer(slots, token, slot_bytes)
    if 0 <= slot < slots_end:
        scratch = np.empty(size, np.float32)
        values = scratch.ctypes.data
        place = slot // block_size * c_block + slot % block_size * c_token
        for h in range(k_heads):
            fetch(at(k, token * k_token + h * k_head, dtype), values, size, dtype)
            turn(values, c, s, known, by, angle)
            _keep(values, at(k_cache, place + h * c_head, stored), size, k_scale, h, scales[0], stored)
            fetch(at(v, token * v_token + h * v_head, dtype), values, size, dtype)
            _keep(values, at(v_cache, place + h * c_head, stored), size, v_scale, h, scales[1], stored)


@numba_glue.kernel
def _rope_cache_write(
    threads, q, k, v, k_cache, v_cache, cos, sin, positions, slots, k_scale, v_scale,
    tokens, shape, strides, cache, scales, by, norm, stored, angle, dtype,
):  # fmt: skip
    tensors = (q, k, v, k_cache, v_cache, cos, sin, positions, slots, k_scale, v_scale)
    if threads > 1:
        for i in prange(tokens):
            token = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            _token(token, tensors, shape, strides, cache, scales, by, norm, stored, angle, dtype)
    else:
        for token in range(tokens):
            _token(token, tensors, shape, strides, cache, scales, by, norm, stored, angle, dtype)


def _step(scale) -> int:
    return -1 if scale is None else int(scale.shape[0] > 1)


def _arguments(q, k, v, k_cache, v_cache, cos, sin, positions, slots, k_scale, v_scale, interleaved):
    """The launch arguments, of tensors for `run` and of specs for `compile`."""
    blocks, block_size, k_heads, size = k_cache.shape
    cache = slots.dtype.itemsize, blocks * block_size, block_size, *(k_cache.stride(d) for d in (0, 1, 2))
    strides = tuple(x.stride(d) for x in (q, k, v) for d in (0, 1))
    # A scale that is not there is not read: any address will do.
    scales = (cos if k_scale is None else k_scale), (cos if v_scale is None else v_scale)
    return (
        (q, k, v, k_cache, v_cache, cos, sin, positions, slots, *scales),
        q.shape[0], (q.shape[1], k_heads, size), strides, cache, (_step(k_scale), _step(v_scale)),
        numba_rope.how(cos, sin, positions, interleaved), NO_NORM, STORAGE[k_cache.dtype], STORAGE[cos.dtype],
    )  # fmt: skip


def compile(specs, config: Config, arch: str) -> Artifact:
    return numba_glue.legacy_compile(_rope_cache_write, *_arguments(*specs))


def run(outs, args, config: Config) -> None:
    numba_glue.legacy_launch(_rope_cache_write, config.parallel, *_arguments(*args))
