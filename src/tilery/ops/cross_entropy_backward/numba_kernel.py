"""Rows in parallel over the cores, each in one pass."""

import numpy as np
from numba import prange

from tilery.base.spec import Artifact, TensorSpec
from tilery.languages import numba_glue
from tilery.languages.numba_elements import FP32, at, f32, integer, load, store
from tilery.ops.cross_entropy_backward import outputs
from tilery.parts import numba_rows
from tilery.parts.numba_losses import gradient
from tilery.parts.numba_rows import Config
from tilery.parts.rows import rows

archs = numba_rows.archs


def refusal(
    dloss: TensorSpec, dlse: TensorSpec, logits: TensorSpec, targets: TensorSpec, lse: TensorSpec,
    config: Config | None = None,
) -> str | None:  # fmt: skip
    return numba_rows.refusal(logits)


def default(dloss: TensorSpec, dlse: TensorSpec, logits: TensorSpec, targets: TensorSpec, lse: TensorSpec) -> Config:
    return numba_rows.default(logits, least=2**16)


def configs(
    dloss: TensorSpec, dlse: TensorSpec, logits: TensorSpec, targets: TensorSpec, lse: TensorSpec
) -> list[Config]:
    return numba_rows.configs()


@numba_glue.jit
def _row(x, y, target, n, dloss, dlse, lse, label_smoothing, z_loss, ignored, dtype):
    if ignored or not 0 <= target < n:
        for j in range(n):
            store(y, j, f32(0) if ignored else f32(np.nan), dtype)
        return
    for j in range(n):
        store(y, j, gradient(load(x, j, dtype), False, n, dloss, dlse, lse, label_smoothing, z_loss), dtype)
    hit = gradient(load(x, target, dtype), True, n, dloss, dlse, lse, label_smoothing, z_loss)
    store(y, target, hit, dtype)  # anew, not from y: that is rounded


@numba_glue.jit
def _row_of(row, logits, dloss, dlse, targets, lse, out, stride, n, ignore_index, label_smoothing, z_loss, dtype):
    target = integer(targets, row, 8)
    _row(
        at(logits, row * stride, dtype), at(out, row * n, dtype), target, n, load(dloss, row, FP32),
        load(dlse, row, FP32), load(lse, row, FP32), label_smoothing, z_loss, target == ignore_index, dtype,
    )  # fmt: skip


@numba_glue.kernel
def _cross_entropy_backward(
    threads, logits, dloss, dlse, targets, lse, out, stride, m, n, ignore_index, label_smoothing, z_loss, dtype
):
    s, z = f32(label_smoothing), f32(z_loss)
    if threads > 1:
        for i in prange(m):
            row = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            _row_of(row, logits, dloss, dlse, targets, lse, out, stride, n, ignore_index, s, z, dtype)
    else:
        for row in range(m):
            _row_of(row, logits, dloss, dlse, targets, lse, out, stride, n, ignore_index, s, z, dtype)


def _arguments(outs, dloss, dlse, logits, targets, lse, label_smoothing=0.0, ignore_index=-100, z_loss=0.0):
    """The launch arguments, of tensors for `run` and of specs for `compile`."""
    m, n, stride = rows(logits)
    scalars = ignore_index, float(label_smoothing), float(z_loss)
    return (logits, dloss, dlse, targets, lse, outs[0]), stride, m, n, *scalars


def compile(specs, config: Config, arch: str) -> Artifact:
    return numba_glue.legacy_compile(_cross_entropy_backward, *_arguments(outputs(*specs), *specs))


def run(outs, args, config: Config) -> None:
    numba_glue.legacy_launch(_cross_entropy_backward, config.parallel, *_arguments(outs, *args))
