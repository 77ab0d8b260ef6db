"""fused_moe in Numba: assignments sorted by expert, then tiles of each expert's products over the cores."""

from dataclasses import dataclass

import numpy as np
import torch
from numba import prange

from tilery.base.launch import Launch
from tilery.base.spec import TensorSpec
from tilery.core.kernel import Kernel
from tilery.languages import numba_elements, numba_glue
from tilery.languages.numba_elements import COLUMNS, FP32, STORAGE, ZERO, at, exp, f32, integer, load, move, store
from tilery.languages.numba_glue import jit, kernel
from tilery.ops.matmul.numba import tiles
from tilery.ops.matmul.numba.tiles import tile_product
from tilery.ops.moe.call import FusedMoeCall, limit_of
from tilery.ops.moe.numba_align import align_launch

_MOST_M, _MOST_N = 132, 256  # of a tile


@jit
def _gather_rows(first, last, x, order, rows, x_stride, hidden, topk, dtype):
    for slot in range(first, last):
        token = integer(order, slot, 4) // topk
        for j in range(hidden):
            move(x, token * x_stride + j, rows, slot * hidden + j, dtype)


@kernel
def _gather(threads, x, order, offsets, rows, x_stride, sizes, dtype):
    """The rows of x in the order of their experts; sizes: experts, hidden, choices of a token."""
    experts, hidden, topk = sizes
    count = integer(offsets, experts, 4)
    if threads > 1:
        for i in prange(threads):
            part = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            first, last = part * count // threads, (part + 1) * count // threads
            _gather_rows(first, last, x, order, rows, x_stride, hidden, topk, dtype)
    else:
        _gather_rows(ZERO, count, x, order, rows, x_stride, hidden, topk, dtype)


@jit
def _gated(gate, up, limit, alpha, offset):
    gate = limit if gate > limit else gate  # written so that NaN stays
    up = limit if up > limit else up
    up = -limit if up < -limit else up
    return gate / (f32(1) + exp(-alpha * gate)) * (up + offset)


@jit
def _gate_up_tiles(
    thread, threads, tensors, work, work_sizes, sizes, strides, tile_m, tile_n, flags, limit, alpha, offset, dtype
):
    """Every `threads`-th tile of h, counted through all experts. The two products of a tile stay in fp32."""
    (rows, w, bias, offsets, h), (experts, size, hidden), (w_expert, w_row, w_column) = tensors, sizes, strides
    (biased, interleaved), (work_size, product_size) = flags, work_sizes
    limit, alpha, offset = f32(limit), f32(alpha), f32(offset)
    step, up_row = (2, 1) if interleaved else (1, size)
    own = at(work, thread * work_size, FP32)
    gates = at(own, product_size, FP32)
    ups, turn = at(gates, tile_m * tile_n, FP32), 0
    for expert in range(experts):
        first, end = integer(offsets, expert, 4), integer(offsets, expert + 1, 4)
        for i in range(first, end, tile_m):
            for j in range(0, size, tile_n):
                turn += 1
                if turn % threads != thread:
                    continue
                corner, height, width = at(rows, i * hidden, dtype), min(tile_m, end - i), min(tile_n, size - j)
                for half in range(2):
                    source = at(w, expert * w_expert + (j * step + half * up_row) * w_row, dtype)
                    tile_product(
                        corner, source, ups if half else gates, own, height, width, hidden, (hidden, 1),
                        (w_column, step * w_row), tile_n, tile_n, dtype, FP32,
                    )  # fmt: skip
                for r in range(height):
                    for c in range(width):
                        gate, up = load(gates, r * tile_n + c, FP32), load(ups, r * tile_n + c, FP32)
                        if biased:
                            at_gate = expert * 2 * size + (j + c) * step
                            gate += load(bias, at_gate, dtype)
                            up += load(bias, at_gate + up_row, dtype)
                        store(h, (i + r) * size + j + c, _gated(gate, up, limit, alpha, offset), dtype)


@kernel
def _gate_up(threads, tensors, work, work_sizes, sizes, strides, tile_m, tile_n, flags, limit, alpha, offset, dtype):
    """tensors: rows, weight, bias, offsets, h; sizes: experts, size, hidden; flags: biased, interleaved."""
    if threads > 1:
        for i in prange(threads):
            own = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            _gate_up_tiles(
                own, threads, tensors, work, work_sizes, sizes, strides, tile_m, tile_n, flags, limit, alpha, offset,
                dtype,
            )  # fmt: skip
    else:
        _gate_up_tiles(
            ZERO, threads, tensors, work, work_sizes, sizes, strides, tile_m, tile_n, flags, limit, alpha, offset,
            dtype,
        )  # fmt: skip


@jit
def _down_tiles(thread, threads, tensors, work, work_sizes, sizes, strides, tile_m, tile_n, biased, dtype):
    """Every `threads`-th tile of what assignments add to their tokens."""
    (h, w, bias, weights, order, offsets, parts), (experts, size, hidden) = tensors, sizes
    (w_expert, w_row, w_column), (work_size, product_size) = strides, work_sizes
    own, turn = at(work, thread * work_size, FP32), 0
    sums = at(own, product_size, FP32)
    for expert in range(experts):
        first, end = integer(offsets, expert, 4), integer(offsets, expert + 1, 4)
        for i in range(first, end, tile_m):
            for j in range(0, hidden, tile_n):
                turn += 1
                if turn % threads != thread:
                    continue
                height, width = min(tile_m, end - i), min(tile_n, hidden - j)
                source = at(w, expert * w_expert + j * w_row, dtype)
                tile_product(
                    at(h, i * size, dtype), source, sums, own, height, width, size, (size, 1), (w_column, w_row),
                    tile_n, tile_n, dtype, FP32,
                )  # fmt: skip
                for r in range(height):
                    assignment = integer(order, i + r, 4)
                    weight = load(weights, assignment, FP32)
                    for c in range(width):
                        value = load(sums, r * tile_n + c, FP32)
                        if biased:
                            value += load(bias, expert * hidden + j + c, dtype)
                        store(parts, assignment * hidden + j + c, value * weight, FP32)


@kernel
def _down(threads, tensors, work, work_sizes, sizes, strides, tile_m, tile_n, biased, dtype):
    """tensors: h, weight, bias, weights, order, offsets, parts; sizes: experts, size, hidden."""
    if threads > 1:
        for i in prange(threads):
            own = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            _down_tiles(own, threads, tensors, work, work_sizes, sizes, strides, tile_m, tile_n, biased, dtype)
    else:
        _down_tiles(ZERO, threads, tensors, work, work_sizes, sizes, strides, tile_m, tile_n, biased, dtype)


@jit
def _combine_rows(first, last, parts, inverse, add, y, add_stride, hidden, topk, added, dtype):
    for token in range(first, last):
        for j in range(hidden):
            total = load(add, token * add_stride + j, dtype) if added else f32(0)
            for choice in range(token * topk, (token + 1) * topk):
                if integer(inverse, choice, 4) >= 0:
                    total += load(parts, choice * hidden + j, FP32)
            store(y, token * hidden + j, total, dtype)


@kernel
def _combine(threads, parts, inverse, add, y, add_stride, sizes, added, dtype):
    """y = add + the parts of a token, in their order; one that is not here was not written."""
    tokens, hidden, topk = sizes
    if threads > 1:
        for i in prange(threads):
            part = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            first, last = part * tokens // threads, (part + 1) * tokens // threads
            _combine_rows(first, last, parts, inverse, add, y, add_stride, hidden, topk, added, dtype)
    else:
        _combine_rows(ZERO, tokens, parts, inverse, add, y, add_stride, hidden, topk, added, dtype)


@dataclass(frozen=True)
class Config:
    tile_m: int  # rows of a tile, in multiples of the register tile
    tile_n: int
    parallel: bool


class FusedMoe(Kernel):
    archs = ("cpu",)
    Config = Config

    def refusal(self, call: FusedMoeCall, config: Config | None = None) -> str | None:
        why = tiles.tile_refusal(config.tile_m, config.tile_n) if config else None
        return why or numba_elements.refusal(call.x)

    def default(self, call: FusedMoeCall) -> Config:
        parallel = call.assignments * call.size * call.hidden >= 2**18  # less work does not pay for waking threads
        # An expert alone keeps every thread busy.
        most_n = min(_MOST_N, max(-(-call.size // numba_glue.threads(parallel)), COLUMNS))
        return Config(*tiles.tile_sizes(call.rows_per_expert, call.size, _MOST_M, most_n), parallel)

    def configs(self, call: FusedMoeCall) -> list[Config]:
        base, rows, size = self.default(call), call.rows_per_expert, call.size
        found = [tiles.tile_sizes(rows, size, most_m, most_n) for most_m in (60, 132) for most_n in (64, 128, 256)]
        return list(dict.fromkeys([base, *(Config(*tile, base.parallel) for tile in found)]))

    def workspace(self, call: FusedMoeCall, config: Config) -> dict[str, TensorSpec]:
        """For each thread that of a product and two tiles in fp32; rows, h and parts by assignment."""
        where = call.x.device
        product = tiles.workspace(config.tile_m, config.tile_n, config.parallel, where)["work"]
        threads, floats = product.shape
        shapes = {
            "work": ((threads, floats + 2 * config.tile_m * config.tile_n), torch.float32),
            "rows": ((call.assignments, call.hidden), call.x.dtype),
            "h": ((call.assignments, call.size), call.x.dtype),
            "parts": ((call.assignments, call.hidden), torch.float32),
        }
        found = {name: TensorSpec.contiguous(shape, dtype, where) for name, (shape, dtype) in shapes.items()}
        return found | call.aligned(1)

    def launches(self, call: FusedMoeCall, config: Config) -> list[Launch]:
        sizes, options = (call.experts, call.size, call.hidden), {"parallel": config.parallel}
        work_size = call.work.shape[1]
        shared = {
            "work": call.work, "work_sizes": (work_size, work_size - 2 * config.tile_m * config.tile_n),
            "sizes": sizes, "tile_m": config.tile_m, "tile_n": config.tile_n, "dtype": STORAGE[call.x.dtype],
        }  # fmt: skip
        gather = {
            "x": call.x, "order": call.order, "offsets": call.offsets, "rows": call.rows, "x_stride": call.x.stride(0),
            "sizes": (call.experts, call.hidden, call.topk), "dtype": STORAGE[call.x.dtype],
        }  # fmt: skip
        bias = call.x if call.b_gate_up is None else call.b_gate_up
        gate_up = shared | {
            "tensors": (call.rows, call.w_gate_up, bias, call.offsets, call.h),
            "strides": tuple(call.w_gate_up.strides), "flags": (call.b_gate_up is not None, call.interleaved),
            "limit": call.limit.then(limit_of), "alpha": call.alpha, "offset": call.up_offset,
        }  # fmt: skip
        bias = call.x if call.b_down is None else call.b_down
        down = shared | {
            "tensors": (call.h, call.w_down, bias, call.weights, call.order, call.offsets, call.parts),
            "strides": tuple(call.w_down.strides), "biased": call.b_down is not None,
        }  # fmt: skip
        combine = {
            "parts": call.parts, "inverse": call.inverse, "add": call.x if call.add is None else call.add,
            "y": call.y, "add_stride": call.add_stride, "sizes": (call.tokens, call.hidden, call.topk),
            "added": call.add is not None, "dtype": STORAGE[call.x.dtype],
        }  # fmt: skip
        return [
            align_launch(call.ids, call.expert_map, call.sorted, 1),
            Launch(_gather, 1, gather, options=options),
            Launch(_gate_up, 1, gate_up, options=options),
            Launch(_down, 1, down, options=options),
            Launch(_combine, 1, combine, options=options),
        ]


fused_moe = FusedMoe()
