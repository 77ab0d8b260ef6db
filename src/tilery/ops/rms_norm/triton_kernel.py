"""One program per row, or per few short ones, in registers, so x is read once; a long row is read twice."""

import triton
import triton.language as tl

from tilery.base.spec import Artifact, TensorSpec
from tilery.languages import triton_glue
from tilery.languages.triton_glue import take_over
from tilery.ops.rms_norm import outputs
from tilery.parts import triton_norms
from tilery.parts.rows import heads
from tilery.parts.triton_norms import Config, normalise, own_rows

archs = triton_norms.archs

_ROWS = triton_norms.Rows(one_sum=True)


def refusal(x: TensorSpec, weight: TensorSpec, config: Config | None = None) -> str | None:
    return triton_norms.refusal(config)


def default(x: TensorSpec, weight: TensorSpec) -> Config:
    return triton_norms.default(x, _ROWS)


def configs(x: TensorSpec, weight: TensorSpec) -> list[Config]:
    return triton_norms.configs(x, _ROWS)


@triton_glue.early
@triton.jit(do_not_specialize=["m"])
def _rms_norm(
    x_ptr, w_ptr, y_ptr, x_stride, heads, step, m, n, eps, offset,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    take_over()
    row, inside = own_rows(m, ROWS)
    x_row = x_ptr + (row // heads) * x_stride + (row % heads) * step
    y_row = y_ptr + row * n
    normalise(x_row, None, w_ptr, None, y_row, None, None, 0, inside, n, eps, offset, ROWS, BLOCK, READ)


def _arguments(config: Config, outs, x, weight, eps=1e-6, offset=0.0):
    """Of tensors for `run` and of specs for `compile`: rows, launch arguments and constants."""
    m, n, stride, count, step = heads(x)
    arguments = x, weight, outs[0], stride, count, step, m, n, float(eps), float(offset)
    return m, arguments, triton_norms.options(config, m, n, x.dtype.itemsize, inputs=1)


def compile(specs, config: Config, arch: str) -> Artifact:
    _, arguments, constants = _arguments(config, outputs(*specs), *specs)
    return triton_glue.legacy_compile(_rms_norm, arguments, constants, {"num_warps": config.num_warps}, arch)


def run(outs, args, config: Config) -> None:
    m, arguments, constants = _arguments(config, outs, *args)
    options = {"num_warps": config.num_warps}
    triton_glue.legacy_launch(_rms_norm, triton_norms.grid(m, config), arguments, constants, options)
