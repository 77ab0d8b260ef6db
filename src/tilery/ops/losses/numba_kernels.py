"""Cross entropies in Numba, with their backwards.

cross_entropy: rows in parallel over the cores. Each is read twice, the second time from the caches; rows to ignore are
not read. The backward is one pass.

fused_linear_cross_entropy: blocks of rows over the cores. Tiles of logits live in the L2 cache, with a running maximum
and sums for each row. The backward makes blocks of dx, then of dweight: a core computes the tiles of logits that its
block needs and adds up. Logits are computed twice, so that no two cores add to one sum: every run gives the same bits.
"""

import numpy as np
import torch
from numba import prange

from tilery.base.launch import Launch
from tilery.base.rows import rows
from tilery.base.spec import TensorSpec
from tilery.languages import numba_glue
from tilery.languages.numba_elements import (
    COLUMNS,
    DEPTH,
    FP32,
    ONE,
    ROWS,
    STORAGE,
    ZERO,
    at,
    exp,
    f32,
    integer,
    load,
    multiply,
    store,
)  # fmt: skip
from tilery.languages.numba_glue import jit, kernel
from tilery.ops.losses.call import LinearLossCall, LossCall
from tilery.ops.matmul.numba.tiles import pack
from tilery.ops.rows.numba_rows import Config, NumbaRows
from tilery.ops.softmax.numba_kernels import base, row_sums

# Formulas


@jit
def _log_sum(top, total):
    """log(sum(exp(x))) from max(x) and sum(exp(x - base(max(x))))."""
    return base(top) + f32(np.log(total))


@jit
def _loss(lse, target_logit, logit_sum, n, label_smoothing, z_loss):
    """Loss of a row that is not ignored; `logit_sum` is the sum of its n logits."""
    value = lse - (f32(1) - label_smoothing) * target_logit + z_loss * lse * lse
    if label_smoothing > 0:
        value -= label_smoothing * (logit_sum / f32(n))
    return f32(value)


@jit
def _gradient(logit, is_target, n, dloss, dlse, lse, label_smoothing, z_loss):
    """Gradient of a logit of a row whose target is a class; `is_target`: it is the target's own logit."""
    scale = dloss * (f32(1) + f32(2) * z_loss * lse) + dlse
    share = (f32(1) - label_smoothing if is_target else f32(0)) + label_smoothing / f32(n)
    return exp(logit - lse) * scale - dloss * share


# cross_entropy


@jit
def _row(row, x, targets, losses, lses, n, ignore_index, label_smoothing, z_loss, dtype):
    target = integer(targets, row, 8)
    if target == ignore_index:
        store(losses, row, f32(0), FP32)
        store(lses, row, f32(0), FP32)
        return
    top, total, logit_sum = row_sums(x, n, True, dtype)
    lse = _log_sum(top, total)
    target_logit = load(x, target, dtype) if 0 <= target < n else f32(np.nan)
    store(losses, row, _loss(lse, target_logit, logit_sum, n, label_smoothing, z_loss), FP32)
    store(lses, row, lse, FP32)


@kernel
def _cross_entropy(threads, logits, targets, losses, lses, stride, m, n, ignore_index, label_smoothing, z_loss, dtype):
    smoothing, z = f32(label_smoothing), f32(z_loss)
    if threads > 1:
        for i in prange(m):
            row = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            _row(row, at(logits, row * stride, dtype), targets, losses, lses, n, ignore_index, smoothing, z, dtype)
    else:
        for row in range(m):
            _row(row, at(logits, row * stride, dtype), targets, losses, lses, n, ignore_index, smoothing, z, dtype)


class CrossEntropy(NumbaRows):
    least = 2**16

    def launches(self, call: LossCall, config: Config) -> list[Launch]:
        m, n, stride = rows(call.logits)
        args = {"logits": call.logits, "targets": call.targets, "losses": call.loss, "lses": call.lse}
        args |= {"stride": stride, "m": m, "n": n, "ignore_index": call.ignore_index}
        args |= {"label_smoothing": call.label_smoothing, "z_loss": call.z_loss, "dtype": STORAGE[call.logits.dtype]}
        return [Launch(_cross_entropy, 1, args, options={"parallel": config.parallel})]


@jit
def _row_gradients(x, dx, target, n, dloss, dlse, lse, label_smoothing, z_loss, ignored, dtype):
    if ignored or not 0 <= target < n:
        for j in range(n):
            store(dx, j, f32(0) if ignored else f32(np.nan), dtype)
        return
    for j in range(n):
        store(dx, j, _gradient(load(x, j, dtype), False, n, dloss, dlse, lse, label_smoothing, z_loss), dtype)
    at_target = _gradient(load(x, target, dtype), True, n, dloss, dlse, lse, label_smoothing, z_loss)
    store(dx, target, at_target, dtype)  # computed anew, not from dx: that is rounded


@jit
def _row_backward(
    row, dloss, dlse, logits, targets, lse, dlogits, stride, n, ignore_index, label_smoothing, z_loss, dtype
):
    target = integer(targets, row, 8)
    _row_gradients(
        at(logits, row * stride, dtype), at(dlogits, row * n, dtype), target, n, load(dloss, row, FP32),
        load(dlse, row, FP32), load(lse, row, FP32), label_smoothing, z_loss, target == ignore_index, dtype,
    )  # fmt: skip


@kernel
def _cross_entropy_backward(
    threads, dloss, dlse, logits, targets, lse, dlogits, stride, m, n, ignore_index, label_smoothing, z_loss, dtype
):
    s, z = f32(label_smoothing), f32(z_loss)
    if threads > 1:
        for i in prange(m):
            row = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            _row_backward(row, dloss, dlse, logits, targets, lse, dlogits, stride, n, ignore_index, s, z, dtype)
    else:
        for row in range(m):
            _row_backward(row, dloss, dlse, logits, targets, lse, dlogits, stride, n, ignore_index, s, z, dtype)


class CrossEntropyBackward(NumbaRows):
    least = 2**16

    def rows_of(self, call: LossCall) -> TensorSpec:
        return call.logits

    def launches(self, call: LossCall, config: Config) -> list[Launch]:
        m, n, stride = rows(call.logits)
        args = {"dloss": call.dloss, "dlse": call.dlse, "logits": call.logits, "targets": call.targets, "lse": call.lse}
        args |= {"dlogits": call.dlogits, "stride": stride, "m": m, "n": n, "ignore_index": call.ignore_index}
        args |= {"label_smoothing": call.label_smoothing, "z_loss": call.z_loss, "dtype": STORAGE[call.logits.dtype]}
        return [Launch(_cross_entropy_backward, 1, args, options={"parallel": config.parallel})]


cross_entropy, cross_entropy_backward = CrossEntropy(), CrossEntropyBackward()


# Tiles of logits = x · weightᵀ

_BLOCK = 96  # rows of a tile: a multiple of ROWS, whichever it is
assert _BLOCK % ROWS == 0


@jit
def _tile_of_products(a, b, tile, blocks, height, width, k, a_stride, b_stride, dtype):
    """tile [height, width] = a [height, k] · b [width, k]ᵀ, in fp32, its rows DEPTH apart; up to _BLOCK x DEPTH.

    What lies in the blocks past the edges of a and b reaches only what is past the tile's.
    """
    a_block, b_block = blocks, at(blocks, _BLOCK * DEPTH, FP32)
    for i in range(_BLOCK * DEPTH):
        store(tile, i, f32(0), FP32)
    for k0 in range(0, k, DEPTH):
        depth = min(DEPTH, k - k0)
        pack(at(a, k0, dtype), a_block, height, depth, a_stride, 1, DEPTH, dtype)
        for j in range(0, width, COLUMNS):
            pack(at(b, j * b_stride + k0, dtype), b_block, depth, min(COLUMNS, width - j), 1, b_stride, COLUMNS, dtype)
            for r in range(0, height, ROWS):
                multiply(at(a_block, r * DEPTH, FP32), b_block, at(tile, r * DEPTH + j, FP32), DEPTH, depth)


@jit
def _add_products(tile, b, sums, blocks, height, width, k, b_stride, sums_stride, dtype):
    """sums [height, k] += tile [height, width] · b [width, k], in fp32."""
    b_block = at(blocks, _BLOCK * DEPTH, FP32)
    for j in range(0, k, COLUMNS):
        pack(at(b, j, dtype), b_block, width, min(COLUMNS, k - j), b_stride, 1, COLUMNS, dtype)
        for r in range(0, height, ROWS):
            multiply(at(tile, r * DEPTH, FP32), b_block, at(sums, r * sums_stride + j, FP32), sums_stride, width)


_TILE_FLOATS = 2 * _BLOCK * DEPTH + DEPTH * COLUMNS  # of a thread's workspace: a tile, a block of a, a panel of b
_STATE = 4  # floats for each row: the maximum, the sum of exponentials, the sum of logits and the target's logit


# fused_linear_cross_entropy


@jit
def _add_row(tile, state, target, n):
    """Add a row's next n logits to its state."""
    top, total, logit_sum = row_sums(tile, n, True, FP32)
    before = load(state, 0, FP32)
    grown = before if before > top else top  # written so that NaN of the tile stays
    below = base(grown)
    store(state, 0, grown, FP32)
    store(state, 1, f32(load(state, 1, FP32) * exp(before - below) + total * exp(top - below)), FP32)
    store(state, 2, f32(load(state, 2, FP32) + logit_sum), FP32)
    if 0 <= target < n:
        store(state, 3, load(tile, target, FP32), FP32)


@jit
def _linear_rows(first, last, x, weight, targets, losses, lses, work, n, k, strides, scalars, dtype):
    x_stride, weight_stride = strides
    ignore_index, label_smoothing, z_loss = scalars
    tile = at(work, _STATE * _BLOCK, FP32)
    blocks = at(tile, _BLOCK * DEPTH, FP32)
    for i0 in range(first, last, _BLOCK):
        height = min(_BLOCK, last - i0)
        for i in range(_STATE * height):
            start = f32(-np.inf) if i % _STATE == 0 else (f32(np.nan) if i % _STATE == 3 else f32(0))
            store(work, i, start, FP32)
        for j0 in range(0, n, DEPTH):
            width = min(DEPTH, n - j0)
            x_rows, w_rows = at(x, i0 * x_stride, dtype), at(weight, j0 * weight_stride, dtype)
            _tile_of_products(x_rows, w_rows, tile, blocks, height, width, k, x_stride, weight_stride, dtype)
            for i in range(height):
                target = integer(targets, i0 + i, 8) - j0
                _add_row(at(tile, i * DEPTH, FP32), at(work, _STATE * i, FP32), target, width)
        for i in range(height):
            state, ignored = at(work, _STATE * i, FP32), integer(targets, i0 + i, 8) == ignore_index
            lse = _log_sum(load(state, 0, FP32), load(state, 1, FP32))
            value = _loss(lse, load(state, 3, FP32), load(state, 2, FP32), n, label_smoothing, z_loss)
            store(losses, i0 + i, f32(0) if ignored else value, FP32)
            store(lses, i0 + i, f32(0) if ignored else lse, FP32)


@kernel
def _linear_cross_entropy(
    threads, x, weight, targets, losses, lses, work, work_size, shape, strides, ignore_index, label_smoothing, z_loss,
    dtype,
):  # fmt: skip
    (m, n, k), scalars = shape, (ignore_index, f32(label_smoothing), f32(z_loss))
    if threads > 1:
        for i in prange(threads):
            part = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            first, last = part * m // threads, (part + 1) * m // threads
            own = at(work, part * work_size, FP32)
            _linear_rows(first, last, x, weight, targets, losses, lses, own, n, k, strides, scalars, dtype)
    else:
        _linear_rows(ZERO, m, x, weight, targets, losses, lses, work, n, k, strides, scalars, dtype)


class LinearKernel(NumbaRows):
    """Each thread has a workspace of its own."""

    def rows_of(self, call: LinearLossCall) -> TensorSpec:
        return call.x

    def floats(self, call: LinearLossCall) -> int:
        """Size of a thread's workspace."""
        raise NotImplementedError

    def workspace(self, call: LinearLossCall, config: Config) -> dict[str, TensorSpec]:
        shape = (numba_glue.threads(config.parallel), self.floats(call))
        return {"work": TensorSpec.contiguous(shape, torch.float32, call.x.device)}

    def shared_args(self, call: LinearLossCall) -> dict[str, object]:
        """Arguments of forward and backward."""
        return {
            "x": call.x, "weight": call.weight, "targets": call.targets,
            "work": call.work, "work_size": call.work.shape[1], "shape": (call.m, call.n, call.k),
            "ignore_index": call.ignore_index, "label_smoothing": call.label_smoothing, "z_loss": call.z_loss,
            "dtype": STORAGE[call.x.dtype],
        }  # fmt: skip


class FusedLinearCrossEntropy(LinearKernel):
    def default(self, call: LinearLossCall) -> Config:
        return Config(parallel=call.m > 1 and call.m * call.k * call.n >= 2**19)

    def floats(self, call: LinearLossCall) -> int:
        return _TILE_FLOATS + _STATE * _BLOCK

    def launches(self, call: LinearLossCall, config: Config) -> list[Launch]:
        strides = (rows(call.x).stride, call.weight.stride(0))
        args = self.shared_args(call) | {"losses": call.loss, "lses": call.lse, "strides": strides}
        return [Launch(_linear_cross_entropy, 1, args, options={"parallel": config.parallel})]


# fused_linear_cross_entropy_backward


@jit
def _tile_row_gradients(tile, step, first, count, row, n, given, scalars):
    """Replace a row's logits in a tile, `step` apart, of classes from `first` on, by their gradients."""
    dlosses, dlses, lses, targets = given
    ignore_index, label_smoothing, z_loss = scalars
    target = integer(targets, row, 8)
    dloss, dlse, lse = load(dlosses, row, FP32), load(dlses, row, FP32), load(lses, row, FP32)
    if not 0 <= target < n:
        dloss = f32(np.nan)  # and so is every gradient, unless the row is to be ignored
    for j in range(count):
        logit, is_target = load(tile, j * step, FP32), first + j == target
        value = _gradient(logit, is_target, n, dloss, dlse, lse, label_smoothing, z_loss)
        store(tile, j * step, f32(0) if target == ignore_index else f32(value), FP32)


@jit
def _gradient_rows(first, last, a, b, out, work, count, n, k, strides, by_class, given, scalars, dtype):
    """out[first:last] of g · b, where g [rows of a, rows of b] is of x · weightᵀ, or by class of its transpose."""
    a_stride, b_stride, sums_stride = strides
    tile = at(work, _BLOCK * sums_stride, FP32)
    blocks = at(tile, _BLOCK * DEPTH, FP32)
    for i0 in range(first, last, _BLOCK):
        height = min(_BLOCK, last - i0)
        for i in range(_BLOCK * sums_stride):
            store(work, i, f32(0), FP32)
        for j0 in range(0, count, DEPTH):
            width = min(DEPTH, count - j0)
            a_rows, b_rows = at(a, i0 * a_stride, dtype), at(b, j0 * b_stride, dtype)
            _tile_of_products(a_rows, b_rows, tile, blocks, height, width, k, a_stride, b_stride, dtype)
            if by_class:
                for j in range(width):
                    _tile_row_gradients(at(tile, j, FP32), DEPTH, i0, height, j0 + j, n, given, scalars)
            else:
                for i in range(height):
                    _tile_row_gradients(at(tile, i * DEPTH, FP32), 1, j0, width, i0 + i, n, given, scalars)
            _add_products(tile, b_rows, work, blocks, height, width, k, b_stride, sums_stride, dtype)
        for i in range(height):
            for j in range(k):
                store(out, (i0 + i) * k + j, load(work, i * sums_stride + j, FP32), dtype)


@jit
def _both_gradients(part, parts, x, weight, given, dx, dweight, work, shape, strides, scalars, dtype):
    m, n, k = shape
    x_stride, weight_stride, sums_stride = strides
    for by_class in (False, True):  # one call: two would be compiled into the kernel one after the other
        a, b, out = (weight, x, dweight) if by_class else (x, weight, dx)
        steps = (weight_stride, x_stride, sums_stride) if by_class else strides
        height, count = (n, m) if by_class else (m, n)
        first, last = part * height // parts, (part + 1) * height // parts
        _gradient_rows(first, last, a, b, out, work, count, n, k, steps, by_class, given, scalars, dtype)


@kernel
def _linear_cross_entropy_backward(
    threads, x, weight, dloss, dlse, lse, targets, dx, dweight, work, work_size, shape, strides, ignore_index,
    label_smoothing, z_loss, dtype,
):  # fmt: skip
    given, scalars = (dloss, dlse, lse, targets), (ignore_index, f32(label_smoothing), f32(z_loss))
    if threads > 1:
        for i in prange(threads):
            part = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            own = at(work, part * work_size, FP32)
            _both_gradients(part, threads, x, weight, given, dx, dweight, own, shape, strides, scalars, dtype)
    else:
        _both_gradients(ZERO, ONE, x, weight, given, dx, dweight, work, shape, strides, scalars, dtype)


class FusedLinearCrossEntropyBackward(LinearKernel):
    def default(self, call: LinearLossCall) -> Config:
        return Config(parallel=call.m * call.k * call.n >= 2**18)

    def floats(self, call: LinearLossCall) -> int:
        return _TILE_FLOATS + _BLOCK * self.sums_stride(call)

    def sums_stride(self, call: LinearLossCall) -> int:
        """Floats from one row of sums to the next."""
        return -(-call.k // COLUMNS) * COLUMNS

    def launches(self, call: LinearLossCall, config: Config) -> list[Launch]:
        strides = (rows(call.x).stride, call.weight.stride(0), self.sums_stride(call))
        args = self.shared_args(call) | {"dloss": call.dloss, "dlse": call.dlse, "lse": call.lse, "strides": strides}
        args |= {"dx": call.dx, "dweight": call.dweight}
        return [Launch(_linear_cross_entropy_backward, 1, args, options={"parallel": config.parallel})]


fused_linear_cross_entropy = FusedLinearCrossEntropy()
fused_linear_cross_entropy_backward = FusedLinearCrossEntropyBackward()
