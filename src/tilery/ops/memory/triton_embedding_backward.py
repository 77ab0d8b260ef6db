"""embedding_backward in Triton: a program sums a block of one row of the table, in the order of the ids."""

import triton
import triton.language as tl

from tilery.base.launch import Launch
from tilery.base.rows import rows
from tilery.core.call import Call
from tilery.languages.triton_glue import pdl_wait
from tilery.ops.rows import triton_rows
from tilery.ops.rows.triton_rows import Config, TritonRows, grid_of, own_columns

_IDS_PER_WARP = 128  # that a program compares at a time: 4 a thread


@triton.jit
def _embedding_backward(
    i_ptr, dy_ptr, dt_ptr, dy_stride, m, n, IDS: tl.constexpr, BLOCK: tl.constexpr, GRID: tl.constexpr
):
    pdl_wait()
    row, start, cols, mask = own_columns(n, BLOCK, GRID)
    places = tl.arange(0, IDS)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, m, IDS):
        own = tl.load(i_ptr + first + places, mask=places < m - first, other=-1) == row
        part = tl.zeros([BLOCK], tl.float32)  # a sum of sums loses less
        place = tl.min(tl.where(own, places, IDS), 0)
        while place < IDS:
            source = dy_ptr + (first + place).to(tl.int64) * dy_stride + start
            part += tl.load(source + cols, mask=mask, other=0.0).to(tl.float32)
            place = tl.min(tl.where(own & (places > place), places, IDS), 0)
        total += part
    tl.store(dt_ptr + row * n + start + cols, total, mask=mask)


class EmbeddingBackward(TritonRows):
    def default(self, call: Call) -> Config:
        return triton_rows.default(call.dy.shape[-1], block=2048)  # 4096 spills registers; all look at all ids

    def launches(self, call: Call, config: Config) -> list[Launch]:
        m, n, stride = rows(call.dy)
        args = {"i_ptr": call.ids, "dy_ptr": call.dy, "dt_ptr": call.dtable, "dy_stride": stride, "m": m, "n": n}
        grid, constants = grid_of(call.v, n, config)
        constants |= {"IDS": _IDS_PER_WARP * config.num_warps}
        return [Launch(_embedding_backward, grid, args, constants, config.options, pdl=True)]


embedding_backward = EmbeddingBackward()
