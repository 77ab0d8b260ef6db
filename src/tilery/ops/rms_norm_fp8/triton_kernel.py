"""One program per row, or per few short ones, in registers: x is read once; only fp8 and scales are written."""

import triton
import triton.language as tl

from tilery.base.spec import Artifact, TensorSpec
from tilery.languages import triton_glue
from tilery.languages.triton_glue import take_over
from tilery.ops.rms_norm_fp8 import outputs
from tilery.parts import triton_fp8, triton_norms
from tilery.parts.rows import rows
from tilery.parts.triton_norms import Config, normalise, own_rows

archs = triton_norms.archs


def refusal(x: TensorSpec, weight: TensorSpec, per, layout, pow2, format, config: Config | None = None) -> str | None:
    return triton_norms.refusal(config, triton_norms.least_block(per))


def default(x: TensorSpec, weight: TensorSpec, per, layout, pow2, format) -> Config:
    return triton_norms.default(x, triton_norms.to_fp8(per, inputs=1))


def configs(x: TensorSpec, weight: TensorSpec, per, layout, pow2, format) -> list[Config]:
    return triton_norms.configs(x, triton_norms.to_fp8(per, inputs=1))


@triton_glue.early
@triton.jit(do_not_specialize=["m"])
def _rms_norm_fp8(
    x_ptr, w_ptr, y_ptr, s_ptr, x_stride, s_stride, s_step, m, n, eps, offset,
    PER: tl.constexpr, FORMAT: tl.constexpr, POW2: tl.constexpr, NATIVE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    take_over()
    row, inside = own_rows(m, ROWS)
    x_row, y_row, s_row = x_ptr + row * x_stride, y_ptr + row * n, s_ptr + row * s_stride
    normalise(
        x_row, None, w_ptr, None, y_row, None, s_row, s_step, inside, n, eps, offset,
        ROWS, BLOCK, READ, False, PER, FORMAT, POW2, NATIVE,
    )  # fmt: skip


def _arguments(config: Config, outs, x, weight, eps, offset, per, layout, pow2, format):
    """Of tensors for `run` and of specs for `compile`: rows, launch arguments and constants."""
    m, n, stride = rows(x)
    values, scales = outs
    strides = stride, scales.stride(0), scales.stride(1)
    arguments = x, weight, triton_fp8.as_bytes(values), scales, *strides, m, n, float(eps), float(offset)
    constants = {"PER": per, "FORMAT": format, "POW2": pow2, "NATIVE": triton_fp8.native(x.device)}
    return m, arguments, constants | triton_norms.options(config, m, n, x.dtype.itemsize, inputs=1)


def compile(specs, config: Config, arch: str) -> Artifact:
    x, weight, *choices = specs
    _, arguments, constants = _arguments(config, outputs(*specs), x, weight, 1e-6, 0.0, *choices)
    return triton_glue.legacy_compile(_rms_norm_fp8, arguments, constants, {"num_warps": config.num_warps}, arch)


def run(outs, args, config: Config) -> None:
    m, arguments, constants = _arguments(config, outs, *args)
    options = {"num_warps": config.num_warps}
    triton_glue.legacy_launch(_rms_norm_fp8, triton_norms.grid(m, config), arguments, constants, options)
