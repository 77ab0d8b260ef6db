"""One program per row, or per few short ones, in registers, so x is read once; a long row is read three times."""

import triton
import triton.language as tl

from tilery.base.spec import Artifact, TensorSpec
from tilery.languages import triton_glue
from tilery.languages.triton_glue import take_over
from tilery.ops.layer_norm import outputs
from tilery.parts import triton_norms
from tilery.parts.rows import rows
from tilery.parts.triton_norms import Config, normalise, own_rows

archs = triton_norms.archs

_ROWS = triton_norms.Rows()


def refusal(x: TensorSpec, weight: TensorSpec, bias: TensorSpec, config: Config | None = None) -> str | None:
    return triton_norms.refusal(config)


def default(x: TensorSpec, weight: TensorSpec, bias: TensorSpec) -> Config:
    return triton_norms.default(x, _ROWS)


def configs(x: TensorSpec, weight: TensorSpec, bias: TensorSpec) -> list[Config]:
    return triton_norms.configs(x, _ROWS)


@triton_glue.early
@triton.jit(do_not_specialize=["m"])
def _layer_norm(
    x_ptr, w_ptr, b_ptr, y_ptr, x_stride, m, n, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    take_over()
    row, inside = own_rows(m, ROWS)
    x_row, y_row = x_ptr + row * x_stride, y_ptr + row * n
    normalise(x_row, None, w_ptr, b_ptr, y_row, None, None, 0, inside, n, eps, 0.0, ROWS, BLOCK, READ, CENTRED=True)


def _arguments(config: Config, outs, x, weight, bias, eps=1e-5):
    """Of tensors for `run` and of specs for `compile`: rows, launch arguments and constants."""
    m, n, stride = rows(x)
    return (
        m,
        (x, weight, bias, outs[0], stride, m, n, float(eps)),
        triton_norms.options(config, m, n, x.dtype.itemsize, inputs=1),
    )


def compile(specs, config: Config, arch: str) -> Artifact:
    _, arguments, constants = _arguments(config, outputs(*specs), *specs)
    return triton_glue.legacy_compile(_layer_norm, arguments, constants, {"num_warps": config.num_warps}, arch)


def run(outs, args, config: Config) -> None:
    m, arguments, constants = _arguments(config, outs, *args)
    options = {"num_warps": config.num_warps}
    triton_glue.legacy_launch(_layer_norm, triton_norms.grid(m, config), arguments, constants, options)
