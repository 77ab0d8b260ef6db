"""fused_linear_cross_entropy in Triton, with its backward.

Forward: a program takes some rows and a split of the vocabulary. Tiles of logits stay in registers. For each row and
split it leaves a maximum and three sums, which a second launch combines to losses.

Backward: chunk by chunk of the vocabulary, gradients of the logits go to a workspace, and from there come the chunk's
dweight and its part of dx. dx grows in fp32 from chunk to chunk, in order, so every run gives the same bits.
"""

from dataclasses import astuple, dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import triton
import triton.language as tl

from tilery.base.launch import Launch
from tilery.base.rows import rows
from tilery.base.spec import TensorSpec
from tilery.core.kernel import Kernel
from tilery.hardware.gpu import ARCHS, gpu
from tilery.ops.losses.call import LinearLossCall
from tilery.ops.losses.triton.cross_entropy import gradient, log_sum, row_loss, scalars
from tilery.ops.matmul.triton.tiles import Tiles, needs_int64, product, shared_memory_refusal
from tilery.ops.softmax.triton_kernels import base

_SIZES = (  # block_m, block_n, block_k, warps
    (64, 64, 16, 8), (64, 64, 32, 8), (64, 128, 64, 4), (128, 128, 64, 8), (128, 256, 64, 8), (256, 128, 64, 8),
)  # fmt: skip
_TILES = [Tiles(*size, stages) for size in _SIZES for stages in (2, 3, 4)]


def _default_tiles(call: LinearLossCall) -> Tiles:
    """fp32 has no tensor cores; rows off 16 bytes go through registers; few rows take narrow tiles."""
    x, weight = call.x, call.weight
    if x.dtype == torch.float32:
        return Tiles(64, 64, 16, num_warps=8, num_stages=3)
    if any(not t.aligned or t.stride(-2) * t.dtype.itemsize % 16 for t in (x, weight) if len(t.shape) > 1):
        return Tiles(64, 64, 32, num_warps=4, num_stages=2)
    if call.m <= 64:
        return Tiles(64, 64, 128, num_warps=4, num_stages=3)
    return Tiles(128, 128, 64, num_warps=8, num_stages=3)


# Forward

_COMBINED = 32  # rows whose splits a program combines


@triton.jit
def _sum_splits(
    x_ptr, weight_ptr, targets_ptr, sums_ptr, m, n, k, x_stride, weight_stride, split_size,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, INT64: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(m, BLOCK_M)  # neighbours take the same split, so that weight is read from L2
    split = tl.program_id(0) // tiles
    first_row = tl.program_id(0) % tiles * BLOCK_M
    row = first_row + tl.arange(0, BLOCK_M)
    last = min((split + 1) * split_size, n)
    target = tl.load(targets_ptr + row, mask=row < m, other=-1)

    top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    logit_sum = tl.zeros((BLOCK_M,), tl.float32)
    target_logit = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(split * split_size, last, BLOCK_N):
        col = start + tl.arange(0, BLOCK_N)
        logits = product(
            x_ptr, weight_ptr, first_row, start, m, last, k, x_stride, 1, 1, weight_stride,
            BLOCK_M, BLOCK_N, BLOCK_K, INT64,
        )  # fmt: skip
        logit_sum += tl.sum(logits, axis=1)  # past the edges they are 0
        target_logit += tl.sum(tl.where(col[None, :] == target[:, None], logits, 0.0), axis=1)
        logits = tl.where(col[None, :] < last, logits, -float("inf"))
        grown = tl.maximum(top, tl.max(logits, axis=1))
        below = base(grown)
        total = total * tl.exp(top - below) + tl.sum(tl.exp(logits - below[:, None]), axis=1)
        top = grown

    here = sums_ptr + split.to(tl.int64) * m + row
    step = tl.full((), SPLITS, tl.int64) * m
    tl.store(here, top, mask=row < m)
    tl.store(here + step, total, mask=row < m)
    tl.store(here + 2 * step, logit_sum, mask=row < m)
    tl.store(here + 3 * step, target_logit, mask=row < m)


@triton.jit(do_not_specialize=["ignore_index"])
def _combine_splits(
    sums_ptr, targets_ptr, loss_ptr, lse_ptr, m, n, ignore_index: tl.int64, label_smoothing, z_loss,
    ROWS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = sums_ptr + tl.arange(0, SPLITS)[:, None].to(tl.int64) * m + row[None, :]
    step, mask = tl.full((), SPLITS, tl.int64) * m, row[None, :] < m
    target = tl.load(targets_ptr + row, mask=row < m, other=0)
    tops = tl.load(here, mask=mask, other=0.0)
    top = tl.max(tops, axis=0)
    total = tl.sum(tl.load(here + step, mask=mask, other=0.0) * tl.exp(tops - base(top)[None, :]), axis=0)
    logit_sum = tl.sum(tl.load(here + 2 * step, mask=mask, other=0.0), axis=0)
    target_logit = tl.sum(tl.load(here + 3 * step, mask=mask, other=0.0), axis=0)
    target_logit = tl.where((target >= 0) & (target < n), target_logit, float("nan"))
    lse = log_sum(top, total)
    loss = row_loss(lse, target_logit, logit_sum, n, label_smoothing, z_loss)
    tl.store(loss_ptr + row, tl.where(target == ignore_index, 0.0, loss), mask=row < m)
    tl.store(lse_ptr + row, tl.where(target == ignore_index, 0.0, lse), mask=row < m)


@dataclass(frozen=True)
class SplitConfig(Tiles):
    splits: int  # of the vocabulary


class FusedLinearCrossEntropy(Kernel):
    archs = ARCHS
    Config = SplitConfig

    def refusal(self, call: LinearLossCall, config: SplitConfig | None = None) -> str | None:
        if config and (config.splits < 1 or config.splits & (config.splits - 1)):
            return f"splits must be a power of two, got {config.splits}"
        return shared_memory_refusal(call.x, config) if config else None

    def default(self, call: LinearLossCall) -> SplitConfig:
        return self._split(call, _default_tiles(call))

    def configs(self, call: LinearLossCall) -> list[SplitConfig]:
        found = [self._split(call, tiles) for tiles in _TILES]
        tiles = _default_tiles(call)
        found += [SplitConfig(*astuple(tiles), splits) for splits in (1, 4, 16, 64)]
        return [c for c in dict.fromkeys(found) if self.refusal(call, c) is None]

    def _split(self, call: LinearLossCall, tiles: Tiles) -> SplitConfig:
        """As many splits as keep the device busy, two programs an SM, with four tiles at least in each."""
        programs, splits, busy = triton.cdiv(max(call.m, 1), tiles.block_m), 1, 2 * gpu(call.x.device).sms
        while programs * splits < busy and 4 * 2 * splits * tiles.block_n <= call.n:
            splits *= 2
        return SplitConfig(*astuple(tiles), splits)

    def workspace(self, call: LinearLossCall, config: SplitConfig) -> dict[str, TensorSpec]:
        """For every split and row: the maximum, the sum of exponentials, the sum of logits and the target's logit."""
        return {"sums": TensorSpec.contiguous((4, config.splits, call.m), torch.float32, call.x.device)}

    def launches(self, call: LinearLossCall, config: SplitConfig) -> list[Launch]:
        (m, k, stride), n, weight_stride = rows(call.x), call.n, call.weight.stride(0)
        split_size = triton.cdiv(triton.cdiv(n, config.splits), config.block_n) * config.block_n
        args = {"x_ptr": call.x, "weight_ptr": call.weight, "targets_ptr": call.targets, "sums_ptr": call.sums}
        args |= {"m": m, "n": n, "k": k, "x_stride": stride, "weight_stride": weight_stride, "split_size": split_size}
        constants = config.constants() | {"SPLITS": config.splits, "INT64": needs_int64(stride, weight_stride)}
        programs = triton.cdiv(m, config.block_m) * config.splits
        summed = Launch(_sum_splits, programs, args, constants, config.options())
        args = {"sums_ptr": call.sums, "targets_ptr": call.targets, "loss_ptr": call.loss, "lse_ptr": call.lse}
        args |= {"m": m, "n": n, **scalars(call)}
        constants = {"ROWS": _COMBINED, "SPLITS": config.splits}
        return [summed, Launch(_combine_splits, triton.cdiv(m, _COMBINED), args, constants, {"num_warps": 4})]


# Backward


class ByRow(NamedTuple):
    """Pointers to what each row has one of."""

    targets: Any
    dloss: Any
    dlse: Any
    lse: Any


@triton.jit(do_not_specialize=["ignore_index", "first"])
def _chunk_gradients(
    x_ptr, weight_ptr, by_row, grad_ptr, first, width, m, n, k, x_stride, weight_stride, chunk,
    ignore_index: tl.int64, label_smoothing, z_loss,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, INT64: tl.constexpr,
):  # fmt: skip
    """Gradients of the logits of `width` classes from `first` on, in rows of `chunk`; `by_row` is a `ByRow`."""
    tiles = tl.cdiv(m, BLOCK_M)  # neighbours take the same classes, so that weight is read from L2
    first_row = tl.program_id(0) % tiles * BLOCK_M
    first_col = tl.program_id(0) // tiles * BLOCK_N  # in the chunk
    logits = product(
        x_ptr, weight_ptr, first_row, first + first_col, m, first + width, k, x_stride, 1, 1, weight_stride,
        BLOCK_M, BLOCK_N, BLOCK_K, INT64,
    )  # fmt: skip
    row, col = first_row + tl.arange(0, BLOCK_M), first_col + tl.arange(0, BLOCK_N)
    target = tl.load(by_row.targets + row, mask=row < m, other=-1)[:, None]
    dloss = tl.load(by_row.dloss + row, mask=row < m, other=0.0)[:, None]
    dlse = tl.load(by_row.dlse + row, mask=row < m, other=0.0)[:, None]
    lse = tl.load(by_row.lse + row, mask=row < m, other=0.0)[:, None]
    grad = gradient(logits, first + col[None, :], target, n, dloss, dlse, lse, label_smoothing, z_loss)
    grad = tl.where(target == ignore_index, 0.0, grad)
    here = grad_ptr + row[:, None].to(tl.int64) * chunk + col[None, :]
    tl.store(here, grad, mask=(row[:, None] < m) & (col[None, :] < width))


@triton.jit
def _multiply(
    a_ptr, b_ptr, sums_ptr, c_ptr, M, N, K, a_row, a_column, b_row,
    FIRST: tl.constexpr, LAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, INT64: tl.constexpr,
):  # fmt: skip
    """c = sums + a · b, or the sums alone until the last: b and c are row-major, sums is as c but fp32."""
    tiles = tl.cdiv(M, BLOCK_M)
    m0, n0 = tl.program_id(0) % tiles * BLOCK_M, tl.program_id(0) // tiles * BLOCK_N
    acc = product(a_ptr, b_ptr, m0, n0, M, N, K, a_row, a_column, b_row, 1, BLOCK_M, BLOCK_N, BLOCK_K, INT64)
    m, n = m0 + tl.arange(0, BLOCK_M), n0 + tl.arange(0, BLOCK_N)
    here = m[:, None].to(tl.int64) * N + n[None, :]
    mask = (m[:, None] < M) & (n[None, :] < N)
    if not FIRST:
        acc += tl.load(sums_ptr + here, mask=mask, other=0.0)
    if LAST:
        tl.store(c_ptr + here, acc, mask=mask)
    else:
        tl.store(sums_ptr + here, acc, mask=mask)


@dataclass(frozen=True)
class ChunkConfig(Tiles):
    chunk: int  # classes at a time

    old_names: ClassVar[dict[str, str]] = {"piece": "chunk"}  # in files of tuned configs


class FusedLinearCrossEntropyBackward(Kernel):
    archs = ARCHS
    Config = ChunkConfig
    most_bytes = 2**28  # of gradients of logits at a time

    def refusal(self, call: LinearLossCall, config: ChunkConfig | None = None) -> str | None:
        if config and (config.chunk < 1 or config.chunk % config.block_n):
            return f"chunk must be a multiple of block_n = {config.block_n}, got {config.chunk}"
        return shared_memory_refusal(call.x, config) if config else None

    def default(self, call: LinearLossCall) -> ChunkConfig:
        return self._cut(call, _default_tiles(call))

    def configs(self, call: LinearLossCall) -> list[ChunkConfig]:
        found = [self._cut(call, tiles) for tiles in _TILES]
        tiles = _default_tiles(call)
        found.append(ChunkConfig(*astuple(tiles), tiles.block_n))
        return [c for c in dict.fromkeys(found) if self.refusal(call, c) is None]

    def _cut(self, call: LinearLossCall, tiles: Tiles) -> ChunkConfig:
        """Equal chunks whose gradients take `most_bytes`."""
        chunks = triton.cdiv(max(call.m, 1) * call.n * call.x.dtype.itemsize, self.most_bytes)
        return ChunkConfig(*astuple(tiles), triton.cdiv(triton.cdiv(call.n, chunks), tiles.block_n) * tiles.block_n)

    def workspace(self, call: LinearLossCall, config: ChunkConfig) -> dict[str, TensorSpec]:
        """Gradients of a chunk of the logits, and dx so far."""
        grad = TensorSpec.contiguous((call.m, config.chunk), call.x.dtype, call.x.device)
        summed = call.m if config.chunk < call.n else 0  # one chunk makes all of dx
        return {"grad": grad, "dx_sums": TensorSpec.contiguous((summed, call.k), torch.float32, call.x.device)}

    def launches(self, call: LinearLossCall, config: ChunkConfig) -> list[Launch]:
        starts = range(0, call.n, config.chunk)
        found = [launch for first in starts for launch in self._chunk_launches(call, config, first)]
        return [launch for launch in found if launch.grid]  # without rows only dweight is written

    def _chunk_launches(self, call: LinearLossCall, config: ChunkConfig, first: int) -> list[Launch]:
        """Gradients of the logits of classes from `first` on, their dweight, and what they add to dx."""
        (m, k, x_stride), n, chunk, weight_stride = rows(call.x), call.n, config.chunk, call.weight.stride(0)
        width = min(chunk, n - first)
        by_row = ByRow(call.targets, call.dloss, call.dlse, call.lse)
        args = {"x_ptr": call.x, "weight_ptr": call.weight, "by_row": by_row, "grad_ptr": call.grad}
        args |= {"first": first, "width": width, "m": m, "n": n, "k": k, "x_stride": x_stride}
        args |= {"weight_stride": weight_stride, "chunk": chunk, **scalars(call)}
        weight, dweight = call.weight, call.dweight
        if first:
            weight = weight.view((width, k), weight.strides, first * weight_stride)
            dweight = dweight.view((width, k), dweight.strides, first * k)
        grad = {"a_ptr": call.grad, "sums_ptr": call.dx_sums, "N": k}
        of_weight = grad | {"M": width, "K": m, "a_row": 1, "a_column": chunk}
        of_weight |= {"b_ptr": call.x, "b_row": x_stride, "c_ptr": dweight}
        of_x = grad | {"M": m, "K": width, "a_row": chunk, "a_column": 1}
        of_x |= {"b_ptr": weight, "b_row": weight_stride, "c_ptr": call.dx}
        options, int64 = config.options(), needs_int64(x_stride, weight_stride, chunk)
        constants = config.constants() | {"INT64": int64}
        whole, part = {"FIRST": True, "LAST": True}, {"FIRST": first == 0, "LAST": first + width == n}
        return [
            Launch(_chunk_gradients, _programs(config, m, width), args, constants, options),
            Launch(_multiply, _programs(config, width, k), of_weight, constants | whole, options),
            Launch(_multiply, _programs(config, m, k), of_x, constants | part, options),
        ]


def _programs(config: Tiles, m: int, n: int) -> int:
    return triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n)


fused_linear_cross_entropy = FusedLinearCrossEntropy()
fused_linear_cross_entropy_backward = FusedLinearCrossEntropyBackward()
