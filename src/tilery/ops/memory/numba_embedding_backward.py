"""embedding_backward in Numba: rows of the table in parallel over the cores, each summed in the order of the ids."""

import numpy as np
from numba import prange

from tilery.base.launch import Launch
from tilery.base.rows import rows
from tilery.base.spec import TensorSpec
from tilery.core.call import Call
from tilery.languages.numba_elements import FP32, STORAGE, ZERO, at, f32, integer, load, store
from tilery.languages.numba_glue import jit, kernel
from tilery.languages.numba_stream import BLOCK, buffer
from tilery.ops.rows.numba_rows import Config, NumbaRows


@jit
def _rows(first, last, dy, ids, dtable, stride, m, n, size, dtype):
    held, block = buffer(BLOCK)
    for row in range(first, last):
        for start in range(0, n, BLOCK):
            width = min(BLOCK, n - start)
            for j in range(width):
                store(block, j, f32(0), FP32)
            for t in range(m):
                if integer(ids, t, size) == row:
                    source = at(dy, t * stride + start, dtype)
                    for j in range(width):
                        store(block, j, load(block, j, FP32) + load(source, j, dtype), FP32)
            target = at(dtable, row * n + start, dtype)
            for j in range(width):
                store(target, j, load(block, j, FP32), dtype)
    held[0] = f32(0)  # only its address was used: without this Numba would free it before the loop


@kernel
def _embedding_backward(threads, dy, ids, dtable, stride, m, v, n, size, dtype):
    """size: bytes of an id."""
    if threads > 1:
        for i in prange(threads):
            thread = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            first, last = thread * v // threads, (thread + 1) * v // threads
            _rows(first, last, dy, ids, dtable, stride, m, n, size, dtype)
    else:
        _rows(ZERO, v, dy, ids, dtable, stride, m, n, size, dtype)


class EmbeddingBackward(NumbaRows):
    least = 2**16

    def rows_of(self, call: Call) -> TensorSpec:
        found: TensorSpec = call.dtable
        return found

    def launches(self, call: Call, config: Config) -> list[Launch]:
        m, n, stride = rows(call.dy)
        args = {
            "dy": call.dy, "ids": call.ids, "dtable": call.dtable, "stride": stride, "m": m, "v": call.v, "n": n,
            "size": call.ids.dtype.itemsize, "dtype": STORAGE[call.dy.dtype],
        }  # fmt: skip
        return [Launch(_embedding_backward, 1, args, options={"parallel": config.parallel})]


embedding_backward = EmbeddingBackward()
