"""Rows in parallel over the cores; each row is read three times, the last two from the L1 cache."""

import numpy as np
from numba import prange

from tilery.base.spec import Artifact, TensorSpec
from tilery.languages import numba_glue
from tilery.languages.numba_elements import ZERO, at, load, store
from tilery.ops.layer_norm import outputs
from tilery.parts import numba_rows
from tilery.parts.numba_norms import mean, rstd
from tilery.parts.numba_rows import Config
from tilery.parts.rows import rows

archs = numba_rows.archs


def refusal(x: TensorSpec, weight: TensorSpec, bias: TensorSpec, config: Config | None = None) -> str | None:
    return numba_rows.refusal(x)


def default(x: TensorSpec, weight: TensorSpec, bias: TensorSpec) -> Config:
    return numba_rows.default(x, least=2**16)


def configs(x: TensorSpec, weight: TensorSpec, bias: TensorSpec) -> list[Config]:
    return numba_rows.configs()


@numba_glue.jit
def _rows(first, last, x, weight, bias, y, stride, n, eps, dtype):
    for row in range(first, last):
        x_row, y_row = at(x, row * stride, dtype), at(y, row * n, dtype)
        centre = mean(x_row, n, dtype)
        scale = rstd(x_row, centre, n, eps, dtype)
        for j in range(n):
            normal = (load(x_row, j, dtype) - centre) * scale
            store(y_row, j, normal * load(weight, j, dtype) + load(bias, j, dtype), dtype)


@numba_glue.kernel
def _layer_norm(threads, x, weight, bias, y, stride, m, n, eps, dtype):
    if threads > 1:
        for i in prange(threads):
            part = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            first, last = part * m // threads, (part + 1) * m // threads
            _rows(first, last, x, weight, bias, y, stride, n, eps, dtype)
    else:
        _rows(ZERO, m, x, weight, bias, y, stride, n, eps, dtype)


def _arguments(outs, x, weight, bias, eps=1e-5):
    """The launch arguments, of tensors for `run` and of specs for `compile`."""
    m, n, stride = rows(x)
    return (x, weight, bias, outs[0]), stride, m, n, float(eps)


def compile(specs, config: Config, arch: str) -> Artifact:
    return numba_glue.legacy_compile(_layer_norm, *_arguments(outputs(*specs), *specs))


def run(outs, args, config: Config) -> None:
    numba_glue.legacy_launch(_layer_norm, config.parallel, *_arguments(outs, *args))
