"""One program per row, or per few short ones, in registers: x and residual are read once; a long sum is read again."""

import triton
import triton.language as tl

from tilery.base.spec import Artifact, TensorSpec
from tilery.languages import triton_glue
from tilery.languages.triton_glue import take_over
from tilery.ops.add_rms_norm import outputs
from tilery.parts import triton_norms
from tilery.parts.rows import rows
from tilery.parts.triton_norms import Config, normalise, own_rows

archs = triton_norms.archs

_ROWS = triton_norms.Rows(inputs=2, one_sum=True, long=triton_norms.LONG_SUMS, wide=8192)


def refusal(x: TensorSpec, residual: TensorSpec, weight: TensorSpec, config: Config | None = None) -> str | None:
    return triton_norms.refusal(config)


def default(x: TensorSpec, residual: TensorSpec, weight: TensorSpec) -> Config:
    return triton_norms.default(x, _ROWS)


def configs(x: TensorSpec, residual: TensorSpec, weight: TensorSpec) -> list[Config]:
    return triton_norms.configs(x, _ROWS)


@triton_glue.early
@triton.jit(do_not_specialize=["m"])
def _add_rms_norm(
    x_ptr, r_ptr, w_ptr, y_ptr, sum_ptr, x_stride, r_stride, m, n, eps, offset,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    take_over()
    row, inside = own_rows(m, ROWS)
    x_row, r_row, y_row, sum_row = x_ptr + row * x_stride, r_ptr + row * r_stride, y_ptr + row * n, sum_ptr + row * n
    normalise(x_row, r_row, w_ptr, None, y_row, sum_row, None, 0, inside, n, eps, offset, ROWS, BLOCK, READ)


def _arguments(config: Config, outs, x, residual, weight, eps=1e-6, offset=0.0):
    """Of tensors for `run` and of specs for `compile`: rows, launch arguments and constants."""
    m, n, stride = rows(x)
    arguments = x, residual, weight, *outs, stride, rows(residual).stride, m, n, float(eps), float(offset)
    return m, arguments, triton_norms.options(config, m, n, x.dtype.itemsize, inputs=2)


def compile(specs, config: Config, arch: str) -> Artifact:
    _, arguments, constants = _arguments(config, outputs(*specs), *specs)
    return triton_glue.legacy_compile(_add_rms_norm, arguments, constants, {"num_warps": config.num_warps}, arch)


def run(outs, args, config: Config) -> None:
    m, arguments, constants = _arguments(config, outs, *args)
    options = {"num_warps": config.num_warps}
    triton_glue.legacy_launch(_add_rms_norm, triton_norms.grid(m, config), arguments, constants, options)
