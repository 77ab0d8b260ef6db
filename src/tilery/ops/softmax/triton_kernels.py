"""softmax and log_softmax in Triton, with their backwards.

A program keeps a row in registers, in one block or a few, or reads it twice in blocks. A few long rows are split among
programs: one launch finds the sums of the splits, a second one writes.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tilery.base.launch import Launch
from tilery.base.rows import rows
from tilery.base.spec import TensorSpec
from tilery.core.call import Call
from tilery.core.kernel import Kernel
from tilery.hardware.gpu import ARCHS, gpu
from tilery.languages.triton_glue import multiple, pdl_launch_dependents, pdl_wait, vector_of
from tilery.ops.norms.triton import tiles
from tilery.ops.norms.triton.tiles import inside_piece, load_pieces

_BLOCK = 8192  # of a row too long to wait in registers
_LONG = 16384  # values of a row, beyond which it has twice as many warps: 8192 × 18432 took 146.6 µs so, else 148.7
_FEW = 1024  # rows, up to which more warps hide what few programs wait for


def parts(x: TensorSpec, block: int, num_warps: int) -> int:
    """Into how many parts a block is cut, so that a thread's share of each is one access of 16 bytes.

    Places in a part have running values, so these are a thread's own: threads meet once, at the row's end.
    """
    return max(block // (32 * num_warps * 16 // x.dtype.itemsize), 1)


@triton.jit
def base(top):
    """What log(sum(exp(x))) subtracts before exp: the maximum, or 0 where it is infinite and inf - inf would be NaN."""
    return tl.where(tl.abs(top) == float("inf"), 0.0, top)


@triton.jit
def _below(top, LSE: tl.constexpr):
    """-inf alone is worth 0, not NaN; a softmax with +inf is NaN, as its sum then is."""
    return base(top) if LSE else tl.where(top == -float("inf"), 0.0, top)


@triton.jit
def row_sums(x_ptr, first, last, BLOCK: tl.constexpr, PARTS: tl.constexpr, LSE: tl.constexpr):
    """max(x), sum(exp(x - max(x))) and sum(x) of x[first:last], read once, in blocks of `parts(...)` parts.

    LSE: the sum is that of exp(x - base(max(x))). Otherwise x will be read again, and is kept in the cache.
    """
    policy: tl.constexpr = "evict_first" if LSE else "evict_last"
    top = tl.full((BLOCK // PARTS,), -float("inf"), tl.float32)
    exps = tl.zeros((BLOCK // PARTS,), tl.float32)
    plain = tl.zeros((BLOCK // PARTS,), tl.float32)
    for start in range(first, last, BLOCK):
        cols = start + tl.arange(0, PARTS)[:, None] * (BLOCK // PARTS) + tl.arange(0, BLOCK // PARTS)[None, :]
        mask = cols < last
        x = tl.load(x_ptr + cols, mask=mask, other=-float("inf"), eviction_policy=policy).to(tl.float32)
        grown = tl.maximum(top, tl.max(x, axis=0))
        below = _below(grown, LSE)
        exps = exps * tl.exp(top - below) + tl.sum(tl.exp(x - below[None, :]), axis=0)
        plain += tl.sum(tl.where(mask, x, 0.0), axis=0)
        top = grown
    greatest = tl.max(top, axis=0)
    return greatest, tl.sum(exps * tl.exp(top - _below(greatest, LSE)), axis=0), tl.sum(plain, axis=0)


@triton.jit
def _result(x, top, total, LOG: tl.constexpr):
    if LOG:
        return x - top - tl.log(total)
    return tl.exp(x - top) * (1.0 / total)


@triton.jit
def _write(x_ptr, y_ptr, first, last, top, total, BLOCK: tl.constexpr, LOG: tl.constexpr):
    blocks = tl.cdiv(last - first, BLOCK)
    for i in range(blocks):
        cols = first + (blocks - 1 - i) * BLOCK + tl.arange(0, BLOCK)  # backwards: what was read last is still near
        mask = cols < last
        x = tl.load(x_ptr + cols, mask=mask, eviction_policy="evict_first").to(tl.float32)
        tl.store(y_ptr + cols, _result(x, top, total, LOG), mask=mask)


@triton.jit
def _softmax(
    x_ptr, y_ptr, x_stride, n,
    BLOCK: tl.constexpr, PIECES: tl.constexpr, VECTOR: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    pdl_wait()
    n, x_stride = multiple(n, VECTOR), multiple(x_stride, VECTOR)
    row = tl.program_id(0).to(tl.int64)  # int64: row * stride overflows int32 past 2**31 elements
    cols = tl.arange(0, BLOCK)
    every = tl.full((1,), True, tl.int1)
    x = load_pieces(x_ptr + row * x_stride, cols, every, n, -float("inf"), PIECES)
    pdl_launch_dependents()
    tops = x[0].to(tl.float32)
    for i in tl.static_range(1, PIECES):
        tops = tl.maximum(tops, x[i].to(tl.float32))
    top = tl.max(tops, axis=0)  # drops NaN; the sum carries it to the whole row
    exps = tl.exp(x[0].to(tl.float32) - top)
    for i in tl.static_range(1, PIECES):
        exps += tl.exp(x[i].to(tl.float32) - top)
    total = tl.sum(exps, axis=0)
    y_row = y_ptr + row * n
    for i in tl.static_range(PIECES):
        mask = inside_piece(i, cols, every, n, PIECES)
        tl.store(y_row + i * BLOCK + cols, _result(x[i].to(tl.float32), top, total, LOG), mask=mask)


@triton.jit
def _softmax_reread(
    x_ptr, y_ptr, x_stride, n,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, VECTOR: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    pdl_wait()
    n, x_stride = multiple(n, VECTOR), multiple(x_stride, VECTOR)
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    top, total, _ = row_sums(x_ptr, 0, n, BLOCK, PARTS, False)
    _write(x_ptr, y_ptr + row * n, 0, n, top, total, BLOCK, LOG)


@triton.jit
def _sum_splits(
    x_ptr, sums_ptr, x_stride, m, n, split_size,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    pdl_wait()
    n, x_stride = multiple(n, VECTOR), multiple(x_stride, VECTOR)
    row, split = (tl.program_id(0) // SPLITS).to(tl.int64), tl.program_id(0) % SPLITS
    first = split * split_size
    top, total, _ = row_sums(x_ptr + row * x_stride, first, min(first + split_size, n), BLOCK, PARTS, False)
    tl.store(sums_ptr + tl.program_id(0), top)
    tl.store(sums_ptr + m * SPLITS + tl.program_id(0), total)


@triton.jit
def _write_splits(
    x_ptr, sums_ptr, y_ptr, x_stride, m, n, split_size,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, VECTOR: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    pdl_wait()
    n, x_stride = multiple(n, VECTOR), multiple(x_stride, VECTOR)
    row, split = (tl.program_id(0) // SPLITS).to(tl.int64), tl.program_id(0) % SPLITS
    splits = row * SPLITS + tl.arange(0, SPLITS)
    tops = tl.load(sums_ptr + splits)
    top = tl.max(tops, axis=0)
    base = tl.where(tops == -float("inf"), 0.0, tops - top)
    total = tl.sum(tl.load(sums_ptr + m * SPLITS + splits) * tl.exp(base), axis=0)
    first = split * split_size
    _write(x_ptr + row * x_stride, y_ptr + row * n, first, min(first + split_size, n), top, total, BLOCK, LOG)


@dataclass(frozen=True)
class Config:
    block: int  # columns that a program takes at a time; a row that its pieces do not hold is read twice
    num_warps: int
    splits: int = 1  # programs that share a row
    pieces: int = 1  # blocks of a row that wait in registers


@dataclass(frozen=True)
class Softmax(Kernel):
    log: bool

    archs = ARCHS
    Config = Config
    values_per_lane = 128  # of 255 registers; the rest hold addresses
    longest_kept = 32768  # row that waits in registers: 64 values a lane with 16 warps

    def refusal(self, call: Call, config: Config | None = None) -> str | None:
        if config is None:
            return None
        sizes = config.block, config.num_warps, config.splits
        if min(sizes) < 1 or any(size & (size - 1) for size in sizes):
            return f"block, num_warps and splits must be powers of two, got {config}"
        if not 1 <= config.pieces <= (1 if config.splits > 1 else tiles.MOST_PIECES):
            return f"pieces must be 1 to {tiles.MOST_PIECES}, and 1 where programs share a row, got {config}"
        return _register_refusal(config, self.values_per_lane)

    def default(self, call: Call) -> Config:
        m, n, _ = rows(call.x)
        block = triton.next_power_of_2(max(n, 1))
        if block <= self.longest_kept:
            if cut := tiles.cut(n, call.x.dtype.itemsize):
                warps = 2 * cut.num_warps if n > _LONG else cut.num_warps  # exponentials take registers besides
                return Config(cut.block, min(warps, 16), pieces=cut.pieces)
            # 1 × 1024 on an H200: 1.44 µs with four warps, 1.53 with two
            most = min(block // 256, 4) if m <= _FEW else 1
            return Config(block, num_warps=min(max(block // 512, most, 1), 16))
        splits = 1
        while (
            m * splits < gpu(call.x.device).sms and 2 * splits * _BLOCK <= block
        ):  # few long rows would leave SMs idle
            splits *= 2
        return Config(_BLOCK, num_warps=8, splits=splits)

    def configs(self, call: Call) -> list[Config]:
        m, n, _ = rows(call.x)
        block = triton.next_power_of_2(max(n, 1))
        found = [self.default(call)]
        found += [Config(block, warps) for warps in (1, 2, 4, 8, 16) if block <= 2 * self.longest_kept]
        found += [Config(part, warps) for part in (512, 4096, 8192, 16384) for warps in (4, 8, 16) if part < block]
        found += [Config(*cut[:2], pieces=cut.pieces) for cut in tiles.cuts(n)]
        if m < 2 * gpu(call.x.device).sms:
            found += [Config(_BLOCK, 8, splits) for splits in (2, 4, 8, 16, 32) if splits * 1024 <= block]
        return [c for c in dict.fromkeys(found) if self.refusal(call, c) is None]

    def workspace(self, call: Call, config: Config) -> dict[str, TensorSpec]:
        if config.splits == 1:
            return {}
        shape = (2, rows(call.x).m, config.splits)  # the maximum and the sum of every split
        return {"sums": TensorSpec.contiguous(shape, torch.float32, call.x.device)}

    def launches(self, call: Call, config: Config) -> list[Launch]:
        x, y, block = call.x, call.y, config.block
        m, n, stride = rows(x)
        vector = vector_of(x, n, stride)
        options = {"num_warps": config.num_warps}
        row = {"x_ptr": x, "y_ptr": y, "x_stride": stride, "n": n}
        cut = parts(x, block, config.num_warps)
        pieces = max(triton.cdiv(n, block), 1)
        if config.splits == 1 and pieces <= config.pieces:
            constants = {"BLOCK": block, "PIECES": pieces, "VECTOR": vector, "LOG": self.log}
            return [Launch(_softmax, m, row, constants, options, pdl=True)]
        if config.splits == 1:
            constants = {"BLOCK": block, "PARTS": cut, "VECTOR": vector, "LOG": self.log}
            return [Launch(_softmax_reread, m, row, constants, options, pdl=True)]
        split_size = triton.cdiv(triton.cdiv(n, config.splits), 64) * 64  # whole sectors, so that splits start aligned
        shared = {"x_ptr": x, "sums_ptr": call.sums, "x_stride": stride, "m": m, "n": n, "split_size": split_size}
        constants = {"BLOCK": block, "SPLITS": config.splits, "VECTOR": vector}
        programs = m * config.splits
        return [
            Launch(_sum_splits, programs, shared, constants | {"PARTS": cut}, options, pdl=True),
            Launch(_write_splits, programs, shared | {"y_ptr": y}, constants | {"LOG": self.log}, options, pdl=True),
        ]


def _register_refusal(config: "Config | BackwardConfig", values_per_lane: int) -> str | None:
    most, values = 32 * config.num_warps * values_per_lane, config.block * getattr(config, "pieces", 1)
    if values <= most:
        return None
    return f"block of {values} does not fit the registers of {config.num_warps} warps ({most} values)"


softmax, log_softmax = Softmax(log=False), Softmax(log=True)


# Backward


@triton.jit
def _backward_term(dy, y, LOG: tl.constexpr):
    """What these elements add to the row's sum."""
    return dy if LOG else dy * y


@triton.jit
def _gradient(dy, y, total, LOG: tl.constexpr):
    return dy - tl.exp(y) * total if LOG else y * (dy - total)


@triton.jit
def _softmax_backward(dy_ptr, y_ptr, dx_ptr, dy_stride, y_stride, n, BLOCK: tl.constexpr, LOG: tl.constexpr):
    pdl_wait()
    row = tl.program_id(0).to(tl.int64)  # int64: row * stride overflows int32 past 2**31 elements
    cols = tl.arange(0, BLOCK)
    mask = cols < n
    dy = tl.load(dy_ptr + row * dy_stride + cols, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + row * y_stride + cols, mask=mask, other=0.0).to(tl.float32)
    total = tl.sum(_backward_term(dy, y, LOG), axis=0)
    tl.store(dx_ptr + row * n + cols, _gradient(dy, y, total, LOG), mask=mask)


@triton.jit
def _softmax_backward_reread(dy_ptr, y_ptr, dx_ptr, dy_stride, y_stride, n, BLOCK: tl.constexpr, LOG: tl.constexpr):
    pdl_wait()
    row = tl.program_id(0).to(tl.int64)
    dy_ptr += row * dy_stride
    y_ptr += row * y_stride
    dx_ptr += row * n
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        dy = tl.load(dy_ptr + cols, mask=cols < n, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + cols, mask=cols < n, other=0.0).to(tl.float32)
        sums += _backward_term(dy, y, LOG)
    total = tl.sum(sums, axis=0)
    blocks = tl.cdiv(n, BLOCK)
    for i in range(blocks):
        cols = (blocks - 1 - i) * BLOCK + tl.arange(0, BLOCK)  # backwards: what was read last is still near
        dy = tl.load(dy_ptr + cols, mask=cols < n).to(tl.float32)
        y = tl.load(y_ptr + cols, mask=cols < n).to(tl.float32)
        tl.store(dx_ptr + cols, _gradient(dy, y, total, LOG), mask=cols < n)


@dataclass(frozen=True)
class BackwardConfig:
    block: int  # columns that a program holds at a time; rows that are longer are read twice
    num_warps: int


@dataclass(frozen=True)
class SoftmaxBackward(Kernel):
    log: bool

    archs = ARCHS
    Config = BackwardConfig
    values_per_lane = 64  # of each of the two rows
    longest_kept = 16384  # rows that wait in registers: 32 values a lane of each with 16 warps

    def refusal(self, call: Call, config: BackwardConfig | None = None) -> str | None:
        if config is None:
            return None
        sizes = config.block, config.num_warps
        if min(sizes) < 1 or any(size & (size - 1) for size in sizes):
            return f"block and num_warps must be powers of two, got {config}"
        return _register_refusal(config, self.values_per_lane)

    def default(self, call: Call) -> BackwardConfig:
        block = triton.next_power_of_2(max(call.dy.shape[-1], 1))
        if block > self.longest_kept:
            return BackwardConfig(_BLOCK, 16)
        return BackwardConfig(block, min(max(block // 512, 1), 16))

    def configs(self, call: Call) -> list[BackwardConfig]:
        block = triton.next_power_of_2(max(call.dy.shape[-1], 1))
        found = [BackwardConfig(block, warps) for warps in (1, 2, 4, 8, 16) if block <= 2 * self.longest_kept]
        found += [BackwardConfig(part, warps) for part in (512, 4096, 8192) for warps in (4, 8, 16) if part < block]
        return [c for c in dict.fromkeys([self.default(call), *found]) if self.refusal(call, c) is None]

    def launches(self, call: Call, config: BackwardConfig) -> list[Launch]:
        m, n, stride = rows(call.dy)
        kernel = _softmax_backward if n <= config.block else _softmax_backward_reread
        args = {"dy_ptr": call.dy, "y_ptr": call.y, "dx_ptr": call.dx}
        args |= {"dy_stride": stride, "y_stride": rows(call.y).stride, "n": n}
        constants = {"BLOCK": config.block, "LOG": self.log}
        return [Launch(kernel, m, args, constants, {"num_warps": config.num_warps}, pdl=True)]


softmax_backward, log_softmax_backward = SoftmaxBackward(log=False), SoftmaxBackward(log=True)
