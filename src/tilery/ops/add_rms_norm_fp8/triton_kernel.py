"""One program per row, or per few short ones, in registers: x and residual are read once, and nothing is read again."""

import triton
import triton.language as tl

from tilery.base.spec import Artifact, TensorSpec
from tilery.languages import triton_glue
from tilery.languages.triton_glue import take_over
from tilery.ops.add_rms_norm_fp8 import outputs
from tilery.parts import triton_fp8, triton_norms
from tilery.parts.rows import rows
from tilery.parts.triton_norms import Config, normalise, own_rows

archs = triton_norms.archs


def refusal(x: TensorSpec, residual, weight, per, layout, pow2, format, config: Config | None = None) -> str | None:
    return triton_norms.refusal(config, triton_norms.least_block(per))


def default(x: TensorSpec, residual, weight, per, layout, pow2, format) -> Config:
    return triton_norms.default(x, triton_norms.to_fp8(per, inputs=2))


def configs(x: TensorSpec, residual, weight, per, layout, pow2, format) -> list[Config]:
    return triton_norms.configs(x, triton_norms.to_fp8(per, inputs=2))


@triton_glue.early
@triton.jit(do_not_specialize=["m"])
def _add_rms_norm_fp8(
    x_ptr, r_ptr, w_ptr, y_ptr, s_ptr, sum_ptr, x_stride, r_stride, s_stride, s_step, m, n, eps, offset,
    PER: tl.constexpr, FORMAT: tl.constexpr, POW2: tl.constexpr, NATIVE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    take_over()
    row, inside = own_rows(m, ROWS)
    x_row, r_row, sum_row = x_ptr + row * x_stride, r_ptr + row * r_stride, sum_ptr + row * n
    y_row, s_row = y_ptr + row * n, s_ptr + row * s_stride
    normalise(
        x_row, r_row, w_ptr, None, y_row, sum_row, s_row, s_step, inside, n, eps, offset,
        ROWS, BLOCK, READ, False, PER, FORMAT, POW2, NATIVE,
    )  # fmt: skip


def _arguments(config: Config, outs, x, residual, weight, eps, offset, per, layout, pow2, format):
    """Of tensors for `run` and of specs for `compile`: rows, launch arguments and constants."""
    m, n, stride = rows(x)
    values, scales, total = outs
    strides = stride, rows(residual).stride, scales.stride(0), scales.stride(1)
    tensors = x, residual, weight, triton_fp8.as_bytes(values), scales, total
    arguments = *tensors, *strides, m, n, float(eps), float(offset)
    constants = {"PER": per, "FORMAT": format, "POW2": pow2, "NATIVE": triton_fp8.native(x.device)}
    return m, arguments, constants | triton_norms.options(config, m, n, x.dtype.itemsize, inputs=2)


def compile(specs, config: Config, arch: str) -> Artifact:
    *tensors, per, layout, pow2, format = specs
    scalars = 1e-6, 0.0, per, layout, pow2, format
    _, arguments, constants = _arguments(config, outputs(*specs), *tensors, *scalars)
    return triton_glue.legacy_compile(_add_rms_norm_fp8, arguments, constants, {"num_warps": config.num_warps}, arch)


def run(outs, args, config: Config) -> None:
    m, arguments, constants = _arguments(config, outs, *args)
    options = {"num_warps": config.num_warps}
    triton_glue.legacy_launch(_add_rms_norm_fp8, triton_norms.grid(m, config), arguments, constants, options)
