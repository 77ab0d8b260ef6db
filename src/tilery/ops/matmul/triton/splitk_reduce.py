"""splitk_reduce in Triton: a program adds up all parts of a block of one row, with up to eight loads in flight."""

import triton
import triton.language as tl

from tilery.base.launch import Launch
from tilery.core.call import Call
from tilery.languages.triton_glue import pdl_wait
from tilery.ops.matmul.call import part_rows
from tilery.ops.rows import triton_rows
from tilery.ops.rows.triton_rows import Config, TritonRows, own_columns

_IN_FLIGHT = 8


@triton.jit
def _reduce(
    part_ptr, c_ptr, parts, part_stride, row_stride, n,
    IN_FLIGHT: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr, GRID: tl.constexpr,
):  # fmt: skip
    pdl_wait()
    row, start, cols, mask = own_columns(n, BLOCK, GRID)
    part_ptr += row * row_stride + start
    step = tl.cast(part_stride, tl.int64)  # part * stride overflows int32 past 2**31 elements
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, parts, IN_FLIGHT):
        for i in tl.static_range(IN_FLIGHT):
            inside = mask if EVEN else mask & (first + i < parts)
            total += tl.load(part_ptr + (first + i) * step + cols, mask=inside, other=0.0)
    tl.store(c_ptr + row * n + start + cols, total, mask=mask)


class SplitkReduce(TritonRows):
    def default(self, call: Call) -> Config:
        return triton_rows.default(max(part_rows(call.parts).n, 1), block=512)

    def launches(self, call: Call, config: Config) -> list[Launch]:
        (m, n, stride), count = part_rows(call.parts), call.parts.shape[0]
        grid, constants = triton_rows.grid_of(m, n, config)
        in_flight = min(triton.next_power_of_2(count), _IN_FLIGHT) if count else 1
        constants |= {"IN_FLIGHT": in_flight, "EVEN": count % in_flight == 0}
        args = {
            "part_ptr": call.parts, "c_ptr": call.c, "parts": count, "part_stride": call.parts.stride(0),
            "row_stride": stride, "n": n,
        }  # fmt: skip
        return [Launch(_reduce, grid, args, constants, config.options, pdl=True)]


splitk_reduce = SplitkReduce()
