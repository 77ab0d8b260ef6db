"""bmm, grouped_matmul and its backward in Numba: tiles of all matrices over the cores; few rows take dot products."""

from dataclasses import dataclass
from math import ceil

import numpy as np
from numba import prange

from tilery.base.launch import Launch
from tilery.base.spec import TensorSpec
from tilery.core.call import Call
from tilery.core.kernel import Kernel
from tilery.languages import numba_elements, numba_glue
from tilery.languages.numba_elements import COLUMNS, FP32, ONE, STORAGE, ZERO, at, f32, integer, store
from tilery.languages.numba_glue import jit, kernel
from tilery.ops.matmul.call import GroupedCall
from tilery.ops.matmul.numba import tiles
from tilery.ops.matmul.numba.tiles import tile_product


@dataclass(frozen=True)
class Config:
    tile_m: int  # of c, in multiples of the register tile
    tile_n: int
    parallel: bool


class _Batched(Kernel):
    """What the three kernels have in common."""

    archs = ("cpu",)
    Config = Config

    def refusal(self, call: Call, config: Config | None = None) -> str | None:
        why = tiles.tile_refusal(config.tile_m, config.tile_n) if config else None
        return why or numba_elements.refusal(call.a)

    def workspace(self, call: Call, config: Config) -> dict[str, TensorSpec]:
        return tiles.workspace(config.tile_m, config.tile_n, config.parallel, call.a.device)


# bmm


@jit
def _bmm_tiles(first, step, tensors, work, work_size, sizes, a_strides, b_strides, tile_m, tile_n, dtype):
    """Every `step`-th tile."""
    (a, b, c), (count, m, n, k) = tensors, sizes
    (a_batch, a_row, a_column), (b_batch, b_row, b_column) = a_strides, b_strides
    tiles_m, tiles_n = (m + tile_m - 1) // tile_m, (n + tile_n - 1) // tile_n
    own, a_rows, b_rows = at(work, first * work_size, FP32), (a_row, a_column), (b_row, b_column)
    for t in range(first, count * tiles_m * tiles_n, step):
        batch, rest = t // (tiles_m * tiles_n), t % (tiles_m * tiles_n)
        i, j = rest % tiles_m * tile_m, rest // tiles_m * tile_n
        a_corner, b_corner = at(a, batch * a_batch + i * a_row, dtype), at(b, batch * b_batch + j * b_column, dtype)
        target, height, width = at(c, (batch * m + i) * n + j, dtype), min(tile_m, m - i), min(tile_n, n - j)
        tile_product(a_corner, b_corner, target, own, height, width, k, a_rows, b_rows, n, tile_n, dtype, dtype)


@kernel
def _bmm(threads, tensors, work, work_size, sizes, a_strides, b_strides, tile_m, tile_n, dtype):
    """tensors: a, b, c; sizes: count, m, n, k; strides: from matrix to matrix, of rows, of columns."""
    if threads > 1:
        for i in prange(threads):
            thread = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            _bmm_tiles(thread, threads, tensors, work, work_size, sizes, a_strides, b_strides, tile_m, tile_n, dtype)
    else:
        _bmm_tiles(ZERO, ONE, tensors, work, work_size, sizes, a_strides, b_strides, tile_m, tile_n, dtype)


class Bmm(_Batched):
    def default(self, call: Call) -> Config:
        (count, m, k), n = call.a.shape, call.b.shape[2]
        parallel = count * m * n * k >= 2**19  # less work does not pay for waking threads
        tile_m, tile_n = tiles.tile_sizes(m, n)
        threads = numba_glue.threads(parallel)
        if count * ceil(m / tile_m) * ceil(n / tile_n) < threads:  # fewer tiles than threads: narrower ones
            tile_n = tiles.even(n, max(ceil(n / threads), COLUMNS), COLUMNS)
        return Config(tile_m, tile_n, parallel)

    def configs(self, call: Call) -> list[Config]:
        m, n, base = call.a.shape[1], call.b.shape[2], self.default(call)
        sizes = [tiles.tile_sizes(m, n, most_m, most_n) for most_m in (264, 528) for most_n in (128, 256, 512, 1024)]
        return list(dict.fromkeys([base, *(Config(*size, base.parallel) for size in sizes)]))

    def launches(self, call: Call, config: Config) -> list[Launch]:
        (count, m, k), n = call.a.shape, call.b.shape[2]
        args = {
            "tensors": (call.a, call.b, call.c), "work": call.work, "work_size": call.work.shape[1],
            "sizes": (count, m, n, k), "a_strides": tuple(call.a.strides), "b_strides": tuple(call.b.strides),
            "tile_m": config.tile_m, "tile_n": config.tile_n, "dtype": STORAGE[call.a.dtype],
        }  # fmt: skip
        return [Launch(_bmm, 1, args, options={"parallel": config.parallel})]


bmm = Bmm()


# grouped_matmul

_MOST_M = 264  # rows of a tile


@jit
def _rise(offsets, groups, total):
    """Whether offsets never fall and lie between 0 and `total`."""
    before = np.int64(0)
    for group in range(groups):
        end = integer(offsets, group, 4)
        if end < before:
            return False
        before = end
    return before <= total


@jit
def _group_tiles(thread, threads, tensors, work, work_size, sizes, a_strides, b_strides, tile_m, tile_n, dtype):
    """Every `threads`-th tile, counted through all groups; every `threads`-th row that no group has."""
    (a, b, offsets, c), (total, groups, n, k) = tensors, sizes
    (a_row, _), (b_group, b_row, b_column) = a_strides, b_strides
    own, b_rows, tiles_n = at(work, thread * work_size, FP32), (b_row, b_column), (n + tile_n - 1) // tile_n
    turn = start = np.int64(0)
    sound = _rise(offsets, groups, total)
    for group in range(groups if sound else 0):
        end = integer(offsets, group, 4)
        for i in range(start, end, tile_m):
            for t in range(tiles_n):
                if turn % threads == thread:
                    j = t * tile_n
                    a_corner, b_corner = at(a, i * a_row, dtype), at(b, group * b_group + j * b_column, dtype)
                    target, height, width = at(c, i * n + j, dtype), min(tile_m, end - i), min(tile_n, n - j)
                    tile_product(
                        a_corner, b_corner, target, own, height, width, k, a_strides, b_rows, n, tile_n, dtype, dtype
                    )
                turn += 1
        start = end
    for i in range(start + thread, total, threads):
        for j in range(n):
            store(c, i * n + j, f32(0) if sound else f32(np.nan), dtype)


@kernel
def _grouped(threads, tensors, work, work_size, sizes, a_strides, b_strides, tile_m, tile_n, dtype):
    """tensors: a, b, offsets, c; sizes: rows, groups, n, k; strides: as bmm's, a's of rows and columns alone."""
    if threads > 1:
        for i in prange(threads):
            thread = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            _group_tiles(thread, threads, tensors, work, work_size, sizes, a_strides, b_strides, tile_m, tile_n, dtype)
    else:
        _group_tiles(ZERO, ONE, tensors, work, work_size, sizes, a_strides, b_strides, tile_m, tile_n, dtype)


class GroupedMatmul(_Batched):
    def default(self, call: GroupedCall) -> Config:
        parallel = call.rows * call.n * call.k >= 2**19  # less work does not pay for waking threads
        threads = numba_glue.threads(parallel)
        most_n = min(512, max(-(-call.n // threads), COLUMNS))  # a group alone keeps every thread busy
        return Config(*tiles.tile_sizes(call.rows, call.n, _MOST_M, most_n), parallel)

    def configs(self, call: GroupedCall) -> list[Config]:
        rows, n, base = call.rows, call.n, self.default(call)
        sizes = [tiles.tile_sizes(rows, n, most_m, most_n) for most_m in (132, 264, 528) for most_n in (128, 256, 512)]
        return list(dict.fromkeys([base, *(Config(*size, base.parallel) for size in sizes)]))

    def launches(self, call: GroupedCall, config: Config) -> list[Launch]:
        args = {
            "tensors": (call.a, call.b, call.offsets, call.c), "work": call.work, "work_size": call.work.shape[1],
            "sizes": (call.rows, call.groups, call.n, call.k),
            "a_strides": tuple(call.a.strides), "b_strides": tuple(call.b.strides),
            "tile_m": config.tile_m, "tile_n": config.tile_n, "dtype": STORAGE[call.a.dtype],
        }  # fmt: skip
        return [Launch(_grouped, 1, args, options={"parallel": config.parallel})]


grouped_matmul = GroupedMatmul()


# grouped_matmul_backward: db[g] = aᵀ · dc of the rows of group g


@jit
def _gradient_tiles(thread, threads, tensors, work, work_size, sizes, a_strides, dc_strides, tile_m, tile_n, dtype):
    """Every `threads`-th tile, counted through the matrices of all groups; without rows one is a sum of nothing."""
    (a, dc, offsets, db), (total, groups, n, k) = tensors, sizes
    (a_row, a_column), (dc_row, dc_column) = a_strides, dc_strides
    own, across = at(work, thread * work_size, FP32), (a_column, a_row)
    if not _rise(offsets, groups, total):
        for i in range(thread, groups * k, threads):
            for j in range(n):
                store(db, i * n + j, f32(np.nan), dtype)
        return
    turn = start = np.int64(0)
    for group in range(groups):
        end = integer(offsets, group, 4)
        for i in range(0, k, tile_m):
            for j in range(0, n, tile_n):
                if turn % threads == thread:
                    a_corner = at(a, start * a_row + i * a_column, dtype)
                    dc_corner = at(dc, start * dc_row + j * dc_column, dtype)
                    target = at(db, (group * k + i) * n + j, dtype)
                    height, width, deep = min(tile_m, k - i), min(tile_n, n - j), end - start
                    tile_product(
                        a_corner,
                        dc_corner,
                        target,
                        own,
                        height,
                        width,
                        deep,
                        across,
                        dc_strides,
                        n,
                        tile_n,
                        dtype,
                        dtype,
                    )
                turn += 1
        start = end


@kernel
def _gradient(threads, tensors, work, work_size, sizes, a_strides, dc_strides, tile_m, tile_n, dtype):
    """tensors: a, dc, offsets, db; sizes: rows, groups, n, k; strides: of rows and columns."""
    if threads > 1:
        for i in prange(threads):
            own = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            _gradient_tiles(own, threads, tensors, work, work_size, sizes, a_strides, dc_strides, tile_m, tile_n, dtype)
    else:
        _gradient_tiles(ZERO, ONE, tensors, work, work_size, sizes, a_strides, dc_strides, tile_m, tile_n, dtype)


class GroupedMatmulBackward(_Batched):
    def default(self, call: Call) -> Config:
        (rows, k), n = call.a.shape, call.dc.shape[1]
        parallel = rows * n * k >= 2**19  # less work does not pay for waking threads
        most_n = min(512, max(-(-n // numba_glue.threads(parallel)), COLUMNS))  # a group alone keeps every thread busy
        return Config(*tiles.tile_sizes(k, n, _MOST_M, most_n), parallel)

    def configs(self, call: Call) -> list[Config]:
        k, n, base = call.a.shape[1], call.dc.shape[1], self.default(call)
        sizes = [tiles.tile_sizes(k, n, most_m, most_n) for most_m in (132, 264, 528) for most_n in (128, 256, 512)]
        return list(dict.fromkeys([base, *(Config(*size, base.parallel) for size in sizes)]))

    def launches(self, call: Call, config: Config) -> list[Launch]:
        (rows, k), n, groups = call.a.shape, call.dc.shape[1], call.offsets.shape[0]
        args = {
            "tensors": (call.a, call.dc, call.offsets, call.db), "work": call.work, "work_size": call.work.shape[1],
            "sizes": (rows, groups, n, k), "a_strides": tuple(call.a.strides), "dc_strides": tuple(call.dc.strides),
            "tile_m": config.tile_m, "tile_n": config.tile_n, "dtype": STORAGE[call.a.dtype],
        }  # fmt: skip
        return [Launch(_gradient, 1, args, options={"parallel": config.parallel})]


grouped_matmul_backward = GroupedMatmulBackward()
