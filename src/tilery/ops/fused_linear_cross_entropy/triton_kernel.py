"""A program takes some rows and a piece of the vocabulary: tiles of logits live and die in its registers.

What they leave, a maximum and three sums for every row and piece, a second launch joins to losses.
"""

from dataclasses import astuple, dataclass

import torch
import triton
import triton.language as tl

from tilery.base.spec import Artifact, TensorSpec
from tilery.hardware.device import ARCHS
from tilery.languages import triton_glue
from tilery.ops.fused_linear_cross_entropy import outputs
from tilery.parts import triton_losses, triton_tiles
from tilery.parts.rows import rows
from tilery.parts.triton_softmax import base
from tilery.parts.triton_tiles import Tiles, product

archs = ARCHS

_BUSY = 264  # programs that keep an H200 busy: two for each of its processors
_JOINED = 32  # rows that a program joins


@dataclass(frozen=True)
class Config(Tiles):
    splits: int  # pieces of the vocabulary


def refusal(x: TensorSpec, weight: TensorSpec, targets: TensorSpec, config: Config | None = None) -> str | None:
    if config and (config.splits < 1 or config.splits & (config.splits - 1)):
        return f"splits must be a power of two, got {config.splits}"
    return triton_tiles.refusal(x, config) if config else None


def default(x: TensorSpec, weight: TensorSpec, targets: TensorSpec) -> Config:
    return _split(triton_tiles.default(x, weight, rows(x).m), x, weight)


def configs(x: TensorSpec, weight: TensorSpec, targets: TensorSpec) -> list[Config]:
    found = [_split(tiles, x, weight) for tiles in triton_tiles.cuts(x)]
    found += [Config(*astuple(triton_tiles.default(x, weight, rows(x).m)), splits) for splits in (1, 4, 16, 64)]
    return [c for c in dict.fromkeys(found) if refusal(x, weight, targets, c) is None]


def _split(tiles: Tiles, x: TensorSpec, weight: TensorSpec) -> Config:
    """As many pieces as keep the device busy, of four tiles at least."""
    programs, splits = triton.cdiv(max(rows(x).m, 1), tiles.block_m), 1
    while programs * splits < _BUSY and 4 * 2 * splits * tiles.block_n <= weight.shape[0]:
        splits *= 2
    return Config(*astuple(tiles), splits)


def workspace(x: TensorSpec, weight: TensorSpec, targets: TensorSpec, config: Config) -> tuple[TensorSpec, ...]:
    """Of every piece and row: the maximum, the sum of exponentials, the plain sum and the target's logit."""
    return (TensorSpec.contiguous((4, config.splits, rows(x).m), torch.float32, x.device),)


@triton.jit
def _sum_pieces(
    x_ptr, weight_ptr, targets_ptr, sums_ptr, m, n, k, x_stride, weight_stride, piece,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(m, BLOCK_M)  # neighbours take the same piece, so that weight is read from L2
    split = tl.program_id(0) // tiles
    first_row = tl.program_id(0) % tiles * BLOCK_M
    row = first_row + tl.arange(0, BLOCK_M)
    last = min((split + 1) * piece, n)
    target = tl.load(targets_ptr + row, mask=row < m, other=-1)

    top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    plain = tl.zeros((BLOCK_M,), tl.float32)
    picked = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(split * piece, last, BLOCK_N):
        col = start + tl.arange(0, BLOCK_N)
        logits = product(
            x_ptr, weight_ptr, first_row, start, m, last, k, x_stride, 1, 1, weight_stride,
            BLOCK_M, BLOCK_N, BLOCK_K, FAR,
        )  # fmt: skip
        plain += tl.sum(logits, axis=1)  # past the edges they are 0
        picked += tl.sum(tl.where(col[None, :] == target[:, None], logits, 0.0), axis=1)
        logits = tl.where(col[None, :] < last, logits, -float("inf"))
        grown = tl.maximum(top, tl.max(logits, axis=1))
        below = base(grown)
        total = total * tl.exp(top - below) + tl.sum(tl.exp(logits - below[:, None]), axis=1)
        top = grown

    here = sums_ptr + split.to(tl.int64) * m + row
    step = tl.full((), SPLITS, tl.int64) * m
    tl.store(here, top, mask=row < m)
    tl.store(here + step, total, mask=row < m)
    tl.store(here + 2 * step, plain, mask=row < m)
    tl.store(here + 3 * step, picked, mask=row < m)


@triton.jit(do_not_specialize=["ignore_index"])
def _join(
    sums_ptr, targets_ptr, loss_ptr, lse_ptr, m, n, ignore_index, label_smoothing, z_loss,
    ROWS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = sums_ptr + tl.arange(0, SPLITS)[:, None].to(tl.int64) * m + row[None, :]
    step, mask = tl.full((), SPLITS, tl.int64) * m, row[None, :] < m
    target = tl.load(targets_ptr + row, mask=row < m, other=0)
    tops = tl.load(here, mask=mask, other=0.0)
    top = tl.max(tops, axis=0)
    total = tl.sum(tl.load(here + step, mask=mask, other=0.0) * tl.exp(tops - base(top)[None, :]), axis=0)
    plain = tl.sum(tl.load(here + 2 * step, mask=mask, other=0.0), axis=0)
    picked = tl.sum(tl.load(here + 3 * step, mask=mask, other=0.0), axis=0)
    picked = tl.where((target >= 0) & (target < n), picked, float("nan"))
    lse = triton_losses.log_sum(top, total)
    loss = triton_losses.loss(lse, picked, plain, n, label_smoothing, z_loss)
    tl.store(loss_ptr + row, tl.where(target == ignore_index, 0.0, loss), mask=row < m)
    tl.store(lse_ptr + row, tl.where(target == ignore_index, 0.0, lse), mask=row < m)


def _launches(outs, x, weight, targets, label_smoothing, ignore_index, z_loss, config: Config, sums):
    """Kernel, programs, arguments, constants and options of each launch; of tensors or specs."""
    (m, k, stride), n = rows(x), weight.shape[0]
    piece = triton.cdiv(triton.cdiv(n, config.splits), config.block_n) * config.block_n
    programs = triton.cdiv(m, config.block_m) * config.splits
    far = triton_tiles.far(stride, weight.stride(0))
    constants = config.constants() | {"SPLITS": config.splits, "FAR": far}
    arguments = (x, weight, targets, sums, m, n, k, stride, weight.stride(0), piece)
    yield _sum_pieces, programs, arguments, constants, config.options()
    scalars = ignore_index, float(label_smoothing), float(z_loss)
    constants = {"ROWS": _JOINED, "SPLITS": config.splits}
    yield _join, triton.cdiv(m, _JOINED), (sums, targets, *outs, m, n, *scalars), constants, {"num_warps": 4}


def compile(specs, config: Config, arch: str) -> Artifact:
    launches = _launches(outputs(*specs), *specs, 0.1, -100, 0.1, config, *workspace(*specs, config))
    return triton_glue.greediest([triton_glue.legacy_compile(k, a, c, o, arch) for k, _, a, c, o in launches])


def run(outs, args, config: Config, sums) -> None:
    for kernel, programs, arguments, constants, options in _launches(outs, *args, config, sums):
        kernel[(programs,)](*arguments, **constants, **options)
