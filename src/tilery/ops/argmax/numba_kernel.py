"""Rows in parallel over the cores: a row's maximum, then the first place that has it."""

import numpy as np
from numba import prange

from tilery.base.spec import Artifact, TensorSpec
from tilery.languages import numba_glue
from tilery.languages.numba_elements import at, load, store_integer
from tilery.ops.argmax import outputs
from tilery.parts import numba_rows
from tilery.parts.numba_order import order
from tilery.parts.numba_rows import Config
from tilery.parts.rows import rows

archs = numba_rows.archs


def refusal(logits: TensorSpec, config: Config | None = None) -> str | None:
    return numba_rows.refusal(logits)


def default(logits: TensorSpec) -> Config:
    return numba_rows.default(logits, least=2**17)


def configs(logits: TensorSpec) -> list[Config]:
    return numba_rows.configs()


@numba_glue.jit
def _row(x, y, row, n, dtype):
    top = np.int32(-(2**31))
    for j in range(n):
        top = max(top, order(load(x, j, dtype)))
    j = 0
    while order(load(x, j, dtype)) != top:
        j += 1
    store_integer(y, row, j, 8)


@numba_glue.kernel
def _argmax(threads, x, y, x_stride, m, n, dtype):
    if threads > 1:
        for i in prange(m):
            row = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            _row(at(x, row * x_stride, dtype), y, row, n, dtype)
    else:
        for row in range(m):
            _row(at(x, row * x_stride, dtype), y, row, n, dtype)


def _arguments(outs, logits):
    """The launch arguments, of tensors for `run` and of specs for `compile`."""
    m, n, stride = rows(logits)
    return (logits, outs[0]), stride, m, n


def compile(specs, config: Config, arch: str) -> Artifact:
    return numba_glue.legacy_compile(_argmax, *_arguments(outputs(*specs), *specs))


def run(outs, args, config: Config) -> None:
    numba_glue.legacy_launch(_argmax, config.parallel, *_arguments(outs, *args))
