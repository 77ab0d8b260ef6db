"""Rows in parallel over the cores, each in one pass."""

import numpy as np
from numba import prange

from tilery.backends import numba_glue
from tilery.backends.numba_glue import at, exp, f32, load, store
from tilery.ops import numba_rows
from tilery.ops.numba_rows import Config
from tilery.ops.rows import rows
from tilery.ops.silu_mul import outputs
from tilery.spec import Artifact, TensorSpec

archs = numba_rows.archs


def refusal(gate: TensorSpec, up: TensorSpec, config: Config | None = None) -> str | None:
    return numba_rows.refusal(gate)


def default(gate: TensorSpec, up: TensorSpec) -> Config:
    return numba_rows.default(gate, least=2**16)


def configs(gate: TensorSpec, up: TensorSpec) -> list[Config]:
    return numba_rows.configs()


@numba_glue.jit
def _row(gate, up, y, n, dtype):
    for j in range(n):
        value = load(gate, j, dtype)
        store(y, j, value / (f32(1) + exp(-value)) * load(up, j, dtype), dtype)


@numba_glue.kernel
def _silu_mul(threads, gate, up, y, gate_stride, up_stride, m, n, dtype):
    if threads > 1:
        for i in prange(m):
            row = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            _row(at(gate, row * gate_stride, dtype), at(up, row * up_stride, dtype), at(y, row * n, dtype), n, dtype)
    else:
        for row in range(m):
            _row(at(gate, row * gate_stride, dtype), at(up, row * up_stride, dtype), at(y, row * n, dtype), n, dtype)


def _arguments(outs, gate, up):
    """The launch arguments, of tensors for `run` and of specs for `compile`."""
    m, n, gate_stride = rows(gate)
    return (gate, up, outs[0]), gate_stride, rows(up).stride, m, n


def compile(specs, config: Config, arch: str) -> Artifact:
    return numba_glue.compile(_silu_mul, *_arguments(outputs(*specs), *specs))


def run(outs, args, config: Config) -> None:
    numba_glue.launch(_silu_mul, config.parallel, *_arguments(outs, *args))
