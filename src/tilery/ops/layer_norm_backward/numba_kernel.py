"""Each core takes a share of the rows and sums over them in rows of its own; these are added in order."""

import numpy as np
from numba import prange

from tilery.base.spec import Artifact, TensorSpec
from tilery.languages import numba_glue
from tilery.languages.numba_elements import FP32, ONE, ZERO, at, f32, load, store
from tilery.ops.layer_norm_backward import outputs
from tilery.parts import numba_rows
from tilery.parts.numba_norms import add_up, clear, mean, partial_sums, rstd, settle
from tilery.parts.numba_rows import Config
from tilery.parts.rows import rows

archs = numba_rows.archs


def refusal(dy: TensorSpec, x: TensorSpec, weight: TensorSpec, config: Config | None = None) -> str | None:
    return numba_rows.refusal(x)


def default(dy: TensorSpec, x: TensorSpec, weight: TensorSpec) -> Config:
    return numba_rows.default(x, least=2**16)


def configs(dy: TensorSpec, x: TensorSpec, weight: TensorSpec) -> list[Config]:
    return numba_rows.configs()


def workspace(dy: TensorSpec, x: TensorSpec, weight: TensorSpec, config: Config) -> tuple[TensorSpec, ...]:
    return partial_sums(x, config), partial_sums(x, config)


@numba_glue.jit
def _row(dy, x, weight, dx, dw_sums, db_sums, n, eps, dtype):
    centre = mean(x, n, dtype)
    scale, dot, total = rstd(x, centre, n, eps, dtype), f32(0), f32(0)
    for j in range(n):
        scaled = load(dy, j, dtype) * load(weight, j, dtype)
        dot += scaled * (load(x, j, dtype) - centre)
        total += scaled
    share, middle = dot / f32(n) * scale, total / f32(n)
    for j in range(n):
        normal, gradient = (load(x, j, dtype) - centre) * scale, load(dy, j, dtype)
        store(dx, j, scale * (gradient * load(weight, j, dtype) - normal * share - middle), dtype)
        store(dw_sums, j, load(dw_sums, j, FP32) + gradient * normal, FP32)
        store(db_sums, j, load(db_sums, j, FP32) + gradient, FP32)


@numba_glue.jit
def _rows(part, threads, dy, x, weight, dx, dw_sums, db_sums, dy_stride, stride, m, n, eps, dtype):
    dw_own, db_own = at(dw_sums, 2 * part * n, FP32), at(db_sums, 2 * part * n, FP32)
    clear(dw_own, n)
    clear(db_own, n)
    for row in range(part * m // threads, (part + 1) * m // threads):
        settle(dw_own, row, n)
        settle(db_own, row, n)
        dy_row, x_row = at(dy, row * dy_stride, dtype), at(x, row * stride, dtype)
        _row(dy_row, x_row, weight, at(dx, row * n, dtype), dw_own, db_own, n, eps, dtype)


@numba_glue.kernel
def _layer_norm_backward(
    threads, dy, x, weight, dx, dweight, dbias, dw_sums, db_sums, dy_stride, stride, m, n, eps, dtype
):
    if threads > 1:
        for i in prange(threads):
            part = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            _rows(part, threads, dy, x, weight, dx, dw_sums, db_sums, dy_stride, stride, m, n, eps, dtype)
    else:
        _rows(ZERO, ONE, dy, x, weight, dx, dw_sums, db_sums, dy_stride, stride, m, n, eps, dtype)
    add_up(dw_sums, dweight, threads, n, dtype)
    add_up(db_sums, dbias, threads, n, dtype)


def _arguments(outs, sums, dy, x, weight, eps=1e-5):
    """The launch arguments, of tensors for `run` and of specs for `compile`."""
    m, n, stride = rows(x)
    return (dy, x, weight, *outs, *sums), rows(dy).stride, stride, m, n, float(eps)


def compile(specs, config: Config, arch: str) -> Artifact:
    return numba_glue.legacy_compile(
        _layer_norm_backward, *_arguments(outputs(*specs), workspace(*specs, config), *specs)
    )


def run(outs, args, config: Config, *sums) -> None:
    numba_glue.legacy_launch(_layer_norm_backward, config.parallel, *_arguments(outs, sums, *args))
