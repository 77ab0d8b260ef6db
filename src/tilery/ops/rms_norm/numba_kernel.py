"""Rows in parallel over the cores; each row is read twice, the second time from the L1 cache."""

import numpy as np
from numba import prange

from tilery.base.spec import Artifact, TensorSpec
from tilery.languages import numba_glue
from tilery.languages.numba_elements import at, f32, load, store
from tilery.ops.rms_norm import outputs
from tilery.parts import numba_rows
from tilery.parts.numba_norms import rstd, start
from tilery.parts.numba_rows import Config
from tilery.parts.rows import heads

archs = numba_rows.archs


def refusal(x: TensorSpec, weight: TensorSpec, config: Config | None = None) -> str | None:
    return numba_rows.refusal(x)


def default(x: TensorSpec, weight: TensorSpec) -> Config:
    return numba_rows.default(x, least=2**17)


def configs(x: TensorSpec, weight: TensorSpec) -> list[Config]:
    return numba_rows.configs()


@numba_glue.jit
def _row(x, weight, y, n, eps, offset, dtype):
    scale, shift = rstd(x, f32(0), n, eps, dtype), f32(offset)
    for j in range(n):
        store(y, j, load(x, j, dtype) * scale * (load(weight, j, dtype) + shift), dtype)


@numba_glue.kernel
def _rms_norm(threads, x, weight, y, stride, heads, step, m, n, eps, offset, dtype):
    if threads > 1:
        for i in prange(m):
            row = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            x_row = at(x, start(row, stride, heads, step), dtype)
            _row(x_row, weight, at(y, row * n, dtype), n, eps, offset, dtype)
    else:
        for row in range(m):
            x_row = at(x, start(row, stride, heads, step), dtype)
            _row(x_row, weight, at(y, row * n, dtype), n, eps, offset, dtype)


def _arguments(outs, x, weight, eps=1e-6, offset=0.0):
    """The launch arguments, of tensors for `run` and of specs for `compile`."""
    m, n, stride, count, step = heads(x)
    return (x, weight, outs[0]), stride, count, step, m, n, float(eps), float(offset)


def compile(specs, config: Config, arch: str) -> Artifact:
    return numba_glue.legacy_compile(_rms_norm, *_arguments(outputs(*specs), *specs))


def run(outs, args, config: Config) -> None:
    numba_glue.legacy_launch(_rms_norm, config.parallel, *_arguments(outs, *args))
