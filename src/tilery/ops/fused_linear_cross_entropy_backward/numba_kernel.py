"""Blocks of dx, then of dweight, over the cores: a core makes the tiles of logits that its block needs and adds up.

Logits are computed twice, so that no two cores add to one sum: every run gives the same bits.
"""

import numpy as np
import torch
from numba import prange

from tilery.base.spec import Artifact, TensorSpec
from tilery.languages import numba_glue
from tilery.languages.numba_elements import DEPTH, FP32, ONE, ZERO, at, f32, integer, load, store
from tilery.ops.fused_linear_cross_entropy_backward import outputs
from tilery.parts import numba_losses, numba_rows
from tilery.parts.numba_losses import BLOCK, add_products, gradient, padded, tile_of_products
from tilery.parts.numba_rows import Config
from tilery.parts.rows import rows

archs = numba_rows.archs


def refusal(
    dloss: TensorSpec, dlse: TensorSpec, x: TensorSpec, weight: TensorSpec, targets: TensorSpec, lse: TensorSpec,
    config: Config | None = None,
) -> str | None:  # fmt: skip
    return numba_rows.refusal(x)


def default(
    dloss: TensorSpec, dlse: TensorSpec, x: TensorSpec, weight: TensorSpec, targets: TensorSpec, lse: TensorSpec
) -> Config:
    m, k, _ = rows(x)
    return Config(parallel=m * k * weight.shape[0] >= 2**18)


def configs(
    dloss: TensorSpec, dlse: TensorSpec, x: TensorSpec, weight: TensorSpec, targets: TensorSpec, lse: TensorSpec
) -> list[Config]:
    return numba_rows.configs()


def workspace(
    dloss: TensorSpec, dlse: TensorSpec, x: TensorSpec, weight: TensorSpec, targets: TensorSpec, lse: TensorSpec,
    config: Config,
) -> tuple[TensorSpec, ...]:  # fmt: skip
    size = numba_losses.floats(x.shape[-1])
    return (TensorSpec.contiguous((numba_glue.threads(config.parallel), size), torch.float32, x.device),)


@numba_glue.jit
def _row_gradients(tile, step, first, count, row, n, given, scalars):
    """Turns a row's logits in a tile, `step` apart, of classes from `first` on, into their gradients."""
    dlosses, dlses, lses, targets = given
    ignore_index, label_smoothing, z_loss = scalars
    target = integer(targets, row, 8)
    dloss, dlse, lse = load(dlosses, row, FP32), load(dlses, row, FP32), load(lses, row, FP32)
    if not 0 <= target < n:
        dloss = f32(np.nan)  # and so is every gradient, unless the row is to be ignored
    for j in range(count):
        logit, hit = load(tile, j * step, FP32), first + j == target
        value = gradient(logit, hit, n, dloss, dlse, lse, label_smoothing, z_loss)
        store(tile, j * step, f32(0) if target == ignore_index else f32(value), FP32)


@numba_glue.jit
def _part(first, last, a, b, out, work, count, n, k, strides, by_class, given, scalars, dtype):
    """out[first:last] of g · b, where g [rows of a, rows of b] is of x · weightᵀ, or by class of its transpose."""
    a_stride, b_stride, sums_stride = strides
    tile = at(work, BLOCK * sums_stride, FP32)
    blocks = at(tile, BLOCK * DEPTH, FP32)
    for i0 in range(first, last, BLOCK):
        height = min(BLOCK, last - i0)
        for i in range(BLOCK * sums_stride):
            store(work, i, f32(0), FP32)
        for j0 in range(0, count, DEPTH):
            width = min(DEPTH, count - j0)
            a_rows, b_rows = at(a, i0 * a_stride, dtype), at(b, j0 * b_stride, dtype)
            tile_of_products(a_rows, b_rows, tile, blocks, height, width, k, a_stride, b_stride, dtype)
            if by_class:
                for j in range(width):
                    _row_gradients(at(tile, j, FP32), DEPTH, i0, height, j0 + j, n, given, scalars)
            else:
                for i in range(height):
                    _row_gradients(at(tile, i * DEPTH, FP32), 1, j0, width, i0 + i, n, given, scalars)
            add_products(tile, b_rows, work, blocks, height, width, k, b_stride, sums_stride, dtype)
        for i in range(height):
            for j in range(k):
                store(out, (i0 + i) * k + j, load(work, i * sums_stride + j, FP32), dtype)


@numba_glue.jit
def _both(part, parts, x, weight, given, dx, dweight, work, shape, strides, scalars, dtype):
    m, n, k = shape
    x_stride, weight_stride, sums_stride = strides
    for by_class in (False, True):  # one call: two would be compiled into the kernel one after the other
        a, b, out = (weight, x, dweight) if by_class else (x, weight, dx)
        steps = (weight_stride, x_stride, sums_stride) if by_class else strides
        height, count = (n, m) if by_class else (m, n)
        first, last = part * height // parts, (part + 1) * height // parts
        _part(first, last, a, b, out, work, count, n, k, steps, by_class, given, scalars, dtype)


@numba_glue.kernel
def _linear_cross_entropy_backward(
    threads, x, weight, dloss, dlse, lse, targets, dx, dweight, work, size, shape, strides, ignore_index,
    label_smoothing, z_loss, dtype,
):  # fmt: skip
    given, scalars = (dloss, dlse, lse, targets), (ignore_index, f32(label_smoothing), f32(z_loss))
    if threads > 1:
        for i in prange(threads):
            part = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            own = at(work, part * size, FP32)
            _both(part, threads, x, weight, given, dx, dweight, own, shape, strides, scalars, dtype)
    else:
        _both(ZERO, ONE, x, weight, given, dx, dweight, work, shape, strides, scalars, dtype)


def _arguments(outs, work, dloss, dlse, x, weight, targets, lse, label_smoothing=0.0, ignore_index=-100, z_loss=0.0):
    """The launch arguments, of tensors for `run` and of specs for `compile`."""
    m, k, stride = rows(x)
    tensors = (x, weight, dloss, dlse, lse, targets, *outs, work)
    shape, strides = (m, weight.shape[0], k), (stride, weight.stride(0), padded(k))
    return tensors, work.shape[1], shape, strides, ignore_index, float(label_smoothing), float(z_loss)


def compile(specs, config: Config, arch: str) -> Artifact:
    arguments = _arguments(outputs(*specs), *workspace(*specs, config), *specs)
    return numba_glue.legacy_compile(_linear_cross_entropy_backward, *arguments)


def run(outs, args, config: Config, work) -> None:
    numba_glue.legacy_launch(_linear_cross_entropy_backward, config.parallel, *_arguments(outs, work, *args))
