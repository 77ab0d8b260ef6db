"""dropout, embedding and transpose in Triton."""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tilery.base.launch import Launch
from tilery.base.rows import flat_rows, rows
from tilery.core.call import Call
from tilery.core.kernel import Kernel
from tilery.hardware.gpu import ARCHS
from tilery.languages.triton_glue import pdl_wait
from tilery.ops.memory import philox
from tilery.ops.rows import triton_rows
from tilery.ops.rows.triton_rows import Config, TritonRows, grid_of, own_columns

# dropout


@triton.jit
def _words(counter, key0, key1):
    """The four words of a counter, as philox.py says."""
    seed = (key1.to(tl.int64) << 32) | (key0.to(tl.int64) & 0xFFFFFFFF)
    low = counter.to(tl.uint32)
    return tl.philox(seed, low, (counter >> 32).to(tl.uint32), low * 0, low * 0)


@triton.jit(do_not_specialize=["key0", "key1"])
def _dropout(
    x_ptr, y_ptr, x_stride, n, key0: tl.int32, key1: tl.int32, p, scale,
    QUADS: tl.constexpr, BLOCK: tl.constexpr, GRID: tl.constexpr,
):  # fmt: skip
    """A program takes a block of one row. QUADS: four neighbours share a counter, since no row starts between them."""
    pdl_wait()
    row, start, cols, mask = own_columns(n, BLOCK, GRID)
    x = tl.load(x_ptr + row * x_stride + start + cols, mask=mask).to(tl.float32)
    first = row * n + start
    if QUADS:
        w0, w1, w2, w3 = _words(first // 4 + tl.arange(0, BLOCK // 4), key0, key1)
        word = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    else:
        index = first + cols
        w0, w1, w2, w3 = _words(index // 4, key0, key1)
        lane = index % 4
        word = tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3))
    uniform = (word >> 8).to(tl.int32).to(tl.float32) * (1.0 / 16777216)
    tl.store(y_ptr + first + cols, tl.where(uniform >= p, x * scale, 0.0), mask=mask)


class Dropout(TritonRows):
    def refusal(self, call: Call, config: Config | None = None) -> str | None:
        if config and config.block < 4:
            return f"block must be 4 at least, the words of a counter, got {config.block}"
        return None

    def default(self, call: Call) -> Config:
        _, n, _ = flat_rows(call.x)
        return triton_rows.default(max(n, 4))

    def launches(self, call: Call, config: Config) -> list[Launch]:
        m, n, stride = flat_rows(call.x)
        args = {"x_ptr": call.x, "y_ptr": call.y, "x_stride": stride, "n": n}
        args |= {"key0": call.seed.then(philox.low_key), "key1": call.seed.then(philox.high_key)}
        args |= {"p": call.p, "scale": call.scale}
        grid, constants = grid_of(m, n, config)
        constants |= {"QUADS": m == 1 or n % 4 == 0}
        return [Launch(_dropout, grid, args, constants, config.options, pdl=True)]


dropout = Dropout()

# embedding


@triton.jit
def _embedding(i_ptr, t_ptr, y_ptr, t_stride, v, n, BLOCK: tl.constexpr, GRID: tl.constexpr):
    """A program copies a block of one row."""
    pdl_wait()
    row, start, cols, mask = own_columns(n, BLOCK, GRID)
    index = tl.load(i_ptr + row).to(tl.int64)
    inside = (index >= 0) & (index < v)
    found = tl.load(t_ptr + index * t_stride + start + cols, mask=mask & inside, other=float("nan"))
    tl.store(y_ptr + row * n + start + cols, found, mask=mask)


class Embedding(TritonRows):
    def default(self, call: Call) -> Config:
        return triton_rows.default(call.table.shape[1], block=4096)

    def launches(self, call: Call, config: Config) -> list[Launch]:
        v, n = call.table.shape
        args = {"i_ptr": call.ids, "t_ptr": call.table, "y_ptr": call.y}
        args |= {"t_stride": call.table.stride(0), "v": v, "n": n}
        grid, constants = grid_of(math.prod(call.ids.shape), n, config)
        return [Launch(_embedding, grid, args, constants, config.options, pdl=True)]


embedding = Embedding()

# transpose


@triton.jit
def _transpose(x_ptr, y_ptr, x_stride, m, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """A program takes a tile, reads it by rows and writes it by columns; it turns in shared memory."""
    pdl_wait()
    down, across = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    tile = tl.program_id(0) % (down * across)
    batch = (tl.program_id(0) // (down * across)).to(tl.int64)
    i = (tile // across * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    j = (tile % across * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    mask = (i < m)[:, None] & (j < n)[None, :]
    x = tl.load(x_ptr + ((batch * m + i) * x_stride)[:, None] + j[None, :], mask=mask)
    tl.store(y_ptr + ((batch * n + j) * m)[:, None] + i[None, :], tl.trans(x), mask=tl.trans(mask))


@dataclass(frozen=True)
class TransposeConfig:
    block_m: int
    block_n: int
    num_warps: int


class Transpose(Kernel):
    archs = ARCHS
    Config = TransposeConfig

    def default(self, call: Call) -> TransposeConfig:
        """Sides of 128 bytes, the least that reads whole lines of the cache both ways."""
        side = max(128 // call.x.dtype.itemsize, 32)
        m, n = (min(side, max(triton.next_power_of_2(size), 16)) for size in call.x.shape[-2:])
        return TransposeConfig(m, n, num_warps=min(max(m * n // 1024, 1), 8))

    def configs(self, call: Call) -> list[TransposeConfig]:
        blocks = ((32, 32), (32, 128), (64, 64), (128, 32), (64, 128))
        return [TransposeConfig(m, n, warps) for m, n in blocks for warps in (4, 8)]

    def launches(self, call: Call, config: TransposeConfig) -> list[Launch]:
        m, n = call.x.shape[-2:]
        count, _, stride = rows(call.x)
        tiles = triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n)
        x, y = (t._replace(dtype=torch.uint8) if t.dtype.itemsize == 1 else t for t in (call.x, call.y))
        args = {"x_ptr": x, "y_ptr": y, "x_stride": stride, "m": m, "n": n}
        constants = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n}
        grid = count // max(m, 1) * tiles
        return [Launch(_transpose, grid, args, constants, {"num_warps": config.num_warps}, pdl=True)]


transpose = Transpose()
