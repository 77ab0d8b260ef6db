"""Piece by piece of the vocabulary: gradients of its logits into a workspace, from there dweight of the piece and dx.

dx grows in fp32 from piece to piece, in order, so every run gives the same bits.
"""

from dataclasses import astuple, dataclass

import torch
import triton
import triton.language as tl

from tilery.base.spec import Artifact, TensorSpec
from tilery.hardware.device import ARCHS
from tilery.languages import triton_glue
from tilery.ops.fused_linear_cross_entropy_backward import outputs
from tilery.parts import triton_tiles
from tilery.parts.rows import rows
from tilery.parts.triton_losses import gradient
from tilery.parts.triton_tiles import Tiles, product

archs = ARCHS

_BYTES = 2**28  # of gradients of logits at a time


@dataclass(frozen=True)
class Config(Tiles):
    piece: int  # classes at a time


def refusal(
    dloss: TensorSpec, dlse: TensorSpec, x: TensorSpec, weight: TensorSpec, targets: TensorSpec, lse: TensorSpec,
    config: Config | None = None,
) -> str | None:  # fmt: skip
    if config and (config.piece < 1 or config.piece % config.block_n):
        return f"piece must be a multiple of block_n = {config.block_n}, got {config.piece}"
    return triton_tiles.refusal(x, config) if config else None


def default(
    dloss: TensorSpec, dlse: TensorSpec, x: TensorSpec, weight: TensorSpec, targets: TensorSpec, lse: TensorSpec
) -> Config:
    return _cut(triton_tiles.default(x, weight, rows(x).m), x, weight, _BYTES)


def configs(
    dloss: TensorSpec, dlse: TensorSpec, x: TensorSpec, weight: TensorSpec, targets: TensorSpec, lse: TensorSpec
) -> list[Config]:
    found = [_cut(tiles, x, weight, _BYTES) for tiles in triton_tiles.cuts(x)]
    found += [Config(*astuple(t), t.block_n) for t in [triton_tiles.default(x, weight, rows(x).m)]]
    return [c for c in dict.fromkeys(found) if refusal(dloss, dlse, x, weight, targets, lse, c) is None]


def _cut(tiles: Tiles, x: TensorSpec, weight: TensorSpec, most: int) -> Config:
    """Equal pieces whose gradients take `most` bytes."""
    m, n = max(rows(x).m, 1), weight.shape[0]
    pieces = triton.cdiv(m * n * x.dtype.itemsize, most)
    return Config(*astuple(tiles), triton.cdiv(triton.cdiv(n, pieces), tiles.block_n) * tiles.block_n)


def workspace(
    dloss: TensorSpec, dlse: TensorSpec, x: TensorSpec, weight: TensorSpec, targets: TensorSpec, lse: TensorSpec,
    config: Config,
) -> tuple[TensorSpec, ...]:  # fmt: skip
    """Gradients of a piece of the logits, and dx so far."""
    m, k, _ = rows(x)
    return (
        TensorSpec.contiguous((m, config.piece), x.dtype, x.device),
        TensorSpec.contiguous((m if config.piece < weight.shape[0] else 0, k), torch.float32, x.device),
    )


@triton.jit(do_not_specialize=["ignore_index", "first"])
def _gradients(
    x_ptr, weight_ptr, targets_ptr, dloss_ptr, dlse_ptr, lse_ptr, grad_ptr, first, width, m, n, k, x_stride,
    weight_stride, piece, ignore_index, label_smoothing, z_loss,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(m, BLOCK_M)  # neighbours take the same classes, so that weight is read from L2
    first_row = tl.program_id(0) % tiles * BLOCK_M
    first_col = tl.program_id(0) // tiles * BLOCK_N  # of the piece
    logits = product(
        x_ptr, weight_ptr, first_row, first + first_col, m, first + width, k, x_stride, 1, 1, weight_stride,
        BLOCK_M, BLOCK_N, BLOCK_K, FAR,
    )  # fmt: skip
    row, col = first_row + tl.arange(0, BLOCK_M), first_col + tl.arange(0, BLOCK_N)
    target = tl.load(targets_ptr + row, mask=row < m, other=-1)[:, None]
    dloss = tl.load(dloss_ptr + row, mask=row < m, other=0.0)[:, None]
    dlse = tl.load(dlse_ptr + row, mask=row < m, other=0.0)[:, None]
    lse = tl.load(lse_ptr + row, mask=row < m, other=0.0)[:, None]
    grad = gradient(logits, first + col[None, :], target, n, dloss, dlse, lse, label_smoothing, z_loss)
    grad = tl.where(target == ignore_index, 0.0, grad)
    here = grad_ptr + row[:, None].to(tl.int64) * piece + col[None, :]
    tl.store(here, grad, mask=(row[:, None] < m) & (col[None, :] < width))


@triton.jit
def _multiply(
    a_ptr, b_ptr, sums_ptr, c_ptr, M, N, K, a_row, a_column, b_row,
    FIRST: tl.constexpr, LAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """c = sums + a · b, or the sums alone until the last: b and c are row-major, sums is as c but fp32."""
    tiles = tl.cdiv(M, BLOCK_M)
    m0, n0 = tl.program_id(0) % tiles * BLOCK_M, tl.program_id(0) // tiles * BLOCK_N
    acc = product(a_ptr, b_ptr, m0, n0, M, N, K, a_row, a_column, b_row, 1, BLOCK_M, BLOCK_N, BLOCK_K, FAR)
    m, n = m0 + tl.arange(0, BLOCK_M), n0 + tl.arange(0, BLOCK_N)
    here = m[:, None].to(tl.int64) * N + n[None, :]
    mask = (m[:, None] < M) & (n[None, :] < N)
    if not FIRST:
        acc += tl.load(sums_ptr + here, mask=mask, other=0.0)
    if LAST:
        tl.store(c_ptr + here, acc, mask=mask)
    else:
        tl.store(sums_ptr + here, acc, mask=mask)


def _programs(config: Config, m: int, n: int) -> int:
    return triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n)


def _launches(
    outs, dloss, dlse, x, weight, targets, lse, label_smoothing, ignore_index, z_loss, config: Config, grad, sums
):
    """Kernel, programs, arguments and constants of each launch; of tensors, or of specs for the first piece alone."""
    (dx, dweight), (m, k, x_stride), (n, _) = outs, rows(x), weight.shape
    weight_stride = weight.stride(0)
    constants = config.constants() | {"FAR": triton_tiles.far(x_stride, weight_stride, config.piece)}
    scalars = ignore_index, float(label_smoothing), float(z_loss)
    for first in range(0, n, config.piece):
        last = min(first + config.piece, n)
        width, start, end = last - first, {"FIRST": first == 0}, {"LAST": last == n}
        values = (x, weight, targets, dloss, dlse, lse, grad)
        shapes = (first, width, m, n, k, x_stride, weight_stride, config.piece)
        yield _gradients, _programs(config, m, width), (*values, *shapes, *scalars), constants
        piece, d_piece = (weight, dweight) if first == 0 else (weight[first:last], dweight[first:last])
        shapes = (width, k, m, 1, config.piece, x_stride)
        yield _multiply, _programs(config, width, k), (grad, x, sums, d_piece, *shapes), constants | {
            "FIRST": True, "LAST": True,
        }  # fmt: skip
        shapes = (m, k, width, config.piece, 1, weight_stride)
        yield _multiply, _programs(config, m, k), (grad, piece, sums, dx, *shapes), constants | start | end


def compile(specs, config: Config, arch: str) -> Artifact:
    launches = _launches(outputs(*specs), *specs, 0.1, -100, 0.1, config, *workspace(*specs, config))
    first = [next(launches) for _ in range(3)]
    return triton_glue.greediest([triton_glue.legacy_compile(k, a, c, config.options(), arch) for k, _, a, c in first])


def run(outs, args, config: Config, grad, sums) -> None:
    for kernel, programs, arguments, constants in _launches(outs, *args, config, grad, sums):
        if programs:
            kernel[(programs,)](*arguments, **constants, **config.options())
