"""Blocks of rows over the cores: tiles of logits live in the L2 cache, with a running maximum and sums for each row."""

import numpy as np
import torch
from numba import prange

from tilery.base.spec import Artifact, TensorSpec
from tilery.languages import numba_glue
from tilery.languages.numba_elements import DEPTH, FP32, ZERO, at, exp, f32, integer, load, store
from tilery.ops.fused_linear_cross_entropy import outputs
from tilery.parts import numba_losses, numba_rows
from tilery.parts.numba_losses import BLOCK, log_sum, loss, tile_of_products
from tilery.parts.numba_rows import Config
from tilery.parts.numba_softmax import base, row_sums
from tilery.parts.rows import rows

archs = numba_rows.archs


def refusal(x: TensorSpec, weight: TensorSpec, targets: TensorSpec, config: Config | None = None) -> str | None:
    return numba_rows.refusal(x)


def default(x: TensorSpec, weight: TensorSpec, targets: TensorSpec) -> Config:
    m, k, _ = rows(x)
    return Config(parallel=m > 1 and m * k * weight.shape[0] >= 2**19)


def configs(x: TensorSpec, weight: TensorSpec, targets: TensorSpec) -> list[Config]:
    return numba_rows.configs()


def workspace(x: TensorSpec, weight: TensorSpec, targets: TensorSpec, config: Config) -> tuple[TensorSpec, ...]:
    size = numba_losses.floats() + 4 * BLOCK
    return (TensorSpec.contiguous((numba_glue.threads(config.parallel), size), torch.float32, x.device),)


@numba_glue.jit
def _add_row(tile, state, target, n):
    """A row's next n logits: state holds the maximum, the sum of exponentials, the plain sum and the target's logit."""
    top, total, plain = row_sums(tile, n, True, FP32)
    before = load(state, 0, FP32)
    grown = before if before > top else top  # written so that NaN of the tile stays
    below = base(grown)
    store(state, 0, grown, FP32)
    store(state, 1, f32(load(state, 1, FP32) * exp(before - below) + total * exp(top - below)), FP32)
    store(state, 2, f32(load(state, 2, FP32) + plain), FP32)
    if 0 <= target < n:
        store(state, 3, load(tile, target, FP32), FP32)


@numba_glue.jit
def _part(first, last, x, weight, targets, losses, sums, work, n, k, x_stride, w_stride, ignore, smoothing, z, dtype):
    tile = at(work, 4 * BLOCK, FP32)
    blocks = at(tile, BLOCK * DEPTH, FP32)
    for i0 in range(first, last, BLOCK):
        height = min(BLOCK, last - i0)
        for i in range(4 * height):
            store(work, i, f32(-np.inf) if i % 4 == 0 else (f32(np.nan) if i % 4 == 3 else f32(0)), FP32)
        for j0 in range(0, n, DEPTH):
            width = min(DEPTH, n - j0)
            x_rows, w_rows = at(x, i0 * x_stride, dtype), at(weight, j0 * w_stride, dtype)
            tile_of_products(x_rows, w_rows, tile, blocks, height, width, k, x_stride, w_stride, dtype)
            for i in range(height):
                target = integer(targets, i0 + i, 8) - j0
                _add_row(at(tile, i * DEPTH, FP32), at(work, 4 * i, FP32), target, width)
        for i in range(height):
            state, ignored = at(work, 4 * i, FP32), integer(targets, i0 + i, 8) == ignore
            lse = log_sum(load(state, 0, FP32), load(state, 1, FP32))
            value = loss(lse, load(state, 3, FP32), load(state, 2, FP32), n, smoothing, z)
            store(losses, i0 + i, f32(0) if ignored else value, FP32)
            store(sums, i0 + i, f32(0) if ignored else lse, FP32)


@numba_glue.kernel
def _linear_cross_entropy(
    threads, x, weight, targets, losses, sums, work, size, m, n, k, x_stride, w_stride, ignore, smoothing, z, dtype
):
    s, z = f32(smoothing), f32(z)
    if threads > 1:
        for i in prange(threads):
            part = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            first, last = part * m // threads, (part + 1) * m // threads
            own = at(work, part * size, FP32)
            _part(first, last, x, weight, targets, losses, sums, own, n, k, x_stride, w_stride, ignore, s, z, dtype)
    else:
        _part(ZERO, m, x, weight, targets, losses, sums, work, n, k, x_stride, w_stride, ignore, s, z, dtype)


def _arguments(outs, work, x, weight, targets, label_smoothing=0.0, ignore_index=-100, z_loss=0.0):
    """The launch arguments, of tensors for `run` and of specs for `compile`."""
    m, k, stride = rows(x)
    shapes = work.shape[1], m, weight.shape[0], k, stride, weight.stride(0)
    return (x, weight, targets, *outs, work), *shapes, ignore_index, float(label_smoothing), float(z_loss)


def compile(specs, config: Config, arch: str) -> Artifact:
    arguments = _arguments(outputs(*specs), *workspace(*specs, config), *specs)
    return numba_glue.legacy_compile(_linear_cross_entropy, *arguments)


def run(outs, args, config: Config, work) -> None:
    numba_glue.legacy_launch(_linear_cross_entropy, config.parallel, *_arguments(outs, work, *args))
