"""Rows in parallel over the cores; each is read twice, the second time from the caches. Rows to ignore are not read."""

import numpy as np
from numba import prange

from tilery.base.spec import Artifact, TensorSpec
from tilery.languages import numba_glue
from tilery.languages.numba_elements import FP32, at, f32, integer, load, store
from tilery.ops.cross_entropy import outputs
from tilery.parts import numba_rows
from tilery.parts.numba_losses import log_sum, loss
from tilery.parts.numba_rows import Config
from tilery.parts.numba_softmax import row_sums
from tilery.parts.rows import rows

archs = numba_rows.archs


def refusal(logits: TensorSpec, targets: TensorSpec, config: Config | None = None) -> str | None:
    return numba_rows.refusal(logits)


def default(logits: TensorSpec, targets: TensorSpec) -> Config:
    return numba_rows.default(logits, least=2**16)


def configs(logits: TensorSpec, targets: TensorSpec) -> list[Config]:
    return numba_rows.configs()


@numba_glue.jit
def _row(row, x, targets, losses, sums, n, ignore_index, label_smoothing, z_loss, dtype):
    target = integer(targets, row, 8)
    if target == ignore_index:
        store(losses, row, f32(0), FP32)
        store(sums, row, f32(0), FP32)
        return
    top, total, plain = row_sums(x, n, True, dtype)
    lse = log_sum(top, total)
    picked = load(x, target, dtype) if 0 <= target < n else f32(np.nan)
    store(losses, row, loss(lse, picked, plain, n, label_smoothing, z_loss), FP32)
    store(sums, row, lse, FP32)


@numba_glue.kernel
def _cross_entropy(threads, logits, targets, losses, sums, stride, m, n, ignore_index, label_smoothing, z_loss, dtype):
    smoothing, z = f32(label_smoothing), f32(z_loss)
    if threads > 1:
        for i in prange(m):
            row = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            _row(row, at(logits, row * stride, dtype), targets, losses, sums, n, ignore_index, smoothing, z, dtype)
    else:
        for row in range(m):
            _row(row, at(logits, row * stride, dtype), targets, losses, sums, n, ignore_index, smoothing, z, dtype)


def _arguments(outs, logits, targets, label_smoothing=0.0, ignore_index=-100, z_loss=0.0):
    """The launch arguments, of tensors for `run` and of specs for `compile`."""
    m, n, stride = rows(logits)
    return (logits, targets, *outs), stride, m, n, ignore_index, float(label_smoothing), float(z_loss)


def compile(specs, config: Config, arch: str) -> Artifact:
    return numba_glue.legacy_compile(_cross_entropy, *_arguments(outputs(*specs), *specs))


def run(outs, args, config: Config) -> None:
    numba_glue.legacy_launch(_cross_entropy, config.parallel, *_arguments(outs, *args))
