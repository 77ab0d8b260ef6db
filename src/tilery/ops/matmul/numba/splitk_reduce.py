"""splitk_reduce in Numba: rows in parallel over the cores; a block of a row is added up in the L1 cache."""

import numpy as np
from numba import prange

from tilery.base.launch import Launch
from tilery.base.spec import TensorSpec
from tilery.core.call import Call
from tilery.languages.numba_elements import FP32, STORAGE, ZERO, at, f32, load, store
from tilery.languages.numba_glue import jit, kernel
from tilery.languages.numba_stream import BLOCK, buffer
from tilery.ops.rows.numba_rows import Config, NumbaRows


@jit
def _rows(parts, c, count, part_stride, row_stride, first, last, n, storage, dtype):
    held, block = buffer(BLOCK)
    for row in range(first, last):
        for start in range(0, n, BLOCK):
            width = min(BLOCK, n - start)
            for j in range(width):
                store(block, j, f32(0), FP32)
            for part in range(count):
                source = at(parts, part * part_stride + row * row_stride + start, dtype)
                for j in range(width):
                    store(block, j, load(block, j, FP32) + load(source, j, dtype), FP32)
            target = at(c, row * n + start, storage)
            for j in range(width):
                store(target, j, load(block, j, FP32), storage)
    held[0] = f32(0)  # only its address was used: without this Numba would free it before the loop


@kernel
def _reduce(threads, parts, c, count, part_stride, row_stride, m, n, storage, dtype):
    """`storage` is how c is stored, `dtype` how the parts are."""
    if threads > 1:
        for i in prange(threads):
            thread = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            first, last = thread * m // threads, (thread + 1) * m // threads
            _rows(parts, c, count, part_stride, row_stride, first, last, n, storage, dtype)
    else:
        _rows(parts, c, count, part_stride, row_stride, ZERO, m, n, storage, dtype)


class SplitkReduce(NumbaRows):
    def rows_of(self, call: Call) -> TensorSpec:
        """The output: what decides is the dtype that is written."""
        return call.c

    def default(self, call: Call) -> Config:
        count, m, n = call.parts.shape
        return Config(parallel=m > 1 and count * m * n >= 2**16)

    def launches(self, call: Call, config: Config) -> list[Launch]:
        count, m, n = call.parts.shape
        args = {
            "parts": call.parts, "c": call.c, "count": count, "part_stride": call.parts.stride(0),
            "row_stride": call.parts.stride(1), "m": m, "n": n,
            "storage": STORAGE[call.c.dtype], "dtype": STORAGE[call.parts.dtype],
        }  # fmt: skip
        return [Launch(_reduce, 1, args, options={"parallel": config.parallel})]


splitk_reduce = SplitkReduce()
