"""Triton kernels of softmax and its logarithm: a row in registers, in blocks, or in pieces that programs share."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from tilery.base.spec import Artifact, TensorSpec
from tilery.hardware.device import ARCHS
from tilery.languages import triton_glue
from tilery.languages.triton_glue import hand_over, take_over
from tilery.parts.rows import rows

archs = ARCHS

_MOST_VALUES = 128  # a lane: of 255 registers; the rest hold addresses
_WHOLE = 32768  # the longest row that waits in registers: 64 values a lane with 16 warps
_BLOCK = 8192  # of a row too long for that
_FEW = 1024  # rows, up to which more warps hide what few programs wait for
_BUSY = 264  # programs that keep an H200 busy: two for each of its processors


@dataclass(frozen=True)
class Config:
    block: int  # columns that a program holds at a time; a row that is longer is read twice
    num_warps: int
    splits: int = 1  # programs that share a row: one launch finds the sums of the pieces, a second one writes


def refusal(x: TensorSpec, config: Config | None = None) -> str | None:
    if config is None:
        return None
    if min(config.block, config.num_warps, config.splits) < 1 or any(
        value & (value - 1) for value in (config.block, config.num_warps, config.splits)
    ):
        return f"block, num_warps and splits must be powers of two, got {config}"
    most = 32 * config.num_warps * _MOST_VALUES
    if config.block > most:
        return f"block of {config.block} does not fit the registers of {config.num_warps} warps ({most} values)"
    return None


def default(x: TensorSpec) -> Config:
    m, n, _ = rows(x)
    block = triton.next_power_of_2(max(n, 1))
    if block <= _WHOLE:
        most = min(block // 256, 4) if m <= _FEW else 1  # 1 × 1024 on an H200: 1.44 µs with four warps, 1.53 with two
        return Config(block, num_warps=min(max(block // 512, most, 1), 16))
    splits = 1
    while m * splits < _BUSY // 2 and 2 * splits * _BLOCK <= block:  # few long rows would leave processors idle
        splits *= 2
    return Config(_BLOCK, num_warps=8, splits=splits)


def configs(x: TensorSpec) -> list[Config]:
    m, n, _ = rows(x)
    block = triton.next_power_of_2(max(n, 1))
    found = [default(x)]
    found += [Config(block, warps) for warps in (1, 2, 4, 8, 16) if block <= 2 * _WHOLE]
    found += [Config(part, warps) for part in (512, 4096, 8192, 16384) for warps in (4, 8, 16) if part < block]
    if m < _BUSY:
        found += [Config(_BLOCK, 8, splits) for splits in (2, 4, 8, 16, 32) if splits * 1024 <= block]
    return [c for c in dict.fromkeys(found) if refusal(x, c) is None]


def workspace(x: TensorSpec, config: Config) -> tuple[TensorSpec, ...]:
    """The maximum and the sum of every piece."""
    if config.splits == 1:
        return ()
    return (TensorSpec.contiguous((2, rows(x).m, config.splits), torch.float32, x.device),)


def parts(x: Any, block: int, num_warps: int) -> int:
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


@triton_glue.early
@triton.jit
def _whole(x_ptr, y_ptr, x_stride, n, BLOCK: tl.constexpr, LOG: tl.constexpr):
    take_over()
    row = tl.program_id(0).to(tl.int64)  # int64: row * stride overflows int32 past 2**31 elements
    cols = tl.arange(0, BLOCK)
    mask = cols < n
    x = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=-float("inf")).to(tl.float32)
    hand_over()
    top = tl.max(x, axis=0)  # drops NaN; the sum carries it to the whole row
    total = tl.sum(tl.exp(x - top), axis=0)
    tl.store(y_ptr + row * n + cols, _result(x, top, total, LOG), mask=mask)


@triton_glue.early
@triton.jit
def _blocks(x_ptr, y_ptr, x_stride, n, BLOCK: tl.constexpr, PARTS: tl.constexpr, LOG: tl.constexpr):
    take_over()
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    top, total, _ = row_sums(x_ptr, 0, n, BLOCK, PARTS, False)
    _write(x_ptr, y_ptr + row * n, 0, n, top, total, BLOCK, LOG)


@triton_glue.early
@triton.jit
def _sum_pieces(x_ptr, sums_ptr, x_stride, m, n, piece, BLOCK: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr):
    take_over()
    row, split = (tl.program_id(0) // SPLITS).to(tl.int64), tl.program_id(0) % SPLITS
    first = split * piece
    top, total, _ = row_sums(x_ptr + row * x_stride, first, min(first + piece, n), BLOCK, PARTS, False)
    tl.store(sums_ptr + tl.program_id(0), top)
    tl.store(sums_ptr + m * SPLITS + tl.program_id(0), total)


@triton_glue.early
@triton.jit
def _write_pieces(
    x_ptr, sums_ptr, y_ptr, x_stride, m, n, piece, BLOCK: tl.constexpr, SPLITS: tl.constexpr, LOG: tl.constexpr
):
    take_over()
    row, split = (tl.program_id(0) // SPLITS).to(tl.int64), tl.program_id(0) % SPLITS
    pieces = row * SPLITS + tl.arange(0, SPLITS)
    tops = tl.load(sums_ptr + pieces)
    top = tl.max(tops, axis=0)
    base = tl.where(tops == -float("inf"), 0.0, tops - top)
    total = tl.sum(tl.load(sums_ptr + m * SPLITS + pieces) * tl.exp(base), axis=0)
    first = split * piece
    _write(x_ptr + row * x_stride, y_ptr + row * n, first, min(first + piece, n), top, total, BLOCK, LOG)


def _launches(outs: Any, x: Any, config: Config, log: bool, sums: Any) -> list[tuple[Any, int, Any, dict[str, Any]]]:
    """Kernel, programs, arguments and constants of each launch, of tensors for `run` and of specs for `compile`."""
    m, n, stride = rows(x)
    constants, cut = {"BLOCK": config.block, "LOG": log}, {"PARTS": parts(x, config.block, config.num_warps)}
    if config.splits == 1:
        whole = n <= config.block
        return [(_whole if whole else _blocks, m, (x, outs[0], stride, n), constants | ({} if whole else cut))]
    piece = triton.cdiv(triton.cdiv(n, config.splits), 64) * 64  # whole sectors, so that pieces start aligned
    split = {"BLOCK": config.block, "SPLITS": config.splits}
    return [
        (_sum_pieces, m * config.splits, (x, sums, stride, m, n, piece), split | cut),
        (_write_pieces, m * config.splits, (x, sums, outs[0], stride, m, n, piece), split | {"LOG": log}),
    ]


def compile(outs: Any, x: TensorSpec, config: Config, arch: str, log: bool) -> Artifact:
    sums = workspace(x, config)[0] if config.splits > 1 else None
    options = {"num_warps": config.num_warps}
    made = [triton_glue.legacy_compile(k, a, c, options, arch) for k, _, a, c in _launches(outs, x, config, log, sums)]
    return triton_glue.greediest(made)


def run(outs: Any, x: Any, config: Config, log: bool, sums: Any = None) -> None:
    for kernel, programs, arguments, constants in _launches(outs, x, config, log, sums):
        triton_glue.legacy_launch(kernel, (programs,), arguments, constants, {"num_warps": config.num_warps})
