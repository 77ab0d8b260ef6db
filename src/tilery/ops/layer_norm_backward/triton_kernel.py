"""A fixed number of programs take turns at the rows, held in registers; their sums over rows are added in order."""

import triton
import triton.language as tl

from tilery.base.spec import Artifact, TensorSpec
from tilery.languages import triton_glue
from tilery.ops.layer_norm_backward import outputs
from tilery.parts import triton_norm_gradients, triton_norms
from tilery.parts.rows import rows
from tilery.parts.triton_norm_gradients import Config, gradients, partial_sums

archs = triton_norms.archs


def refusal(dy: TensorSpec, x: TensorSpec, weight: TensorSpec, config: Config | None = None) -> str | None:
    return triton_norm_gradients.refusal(x.shape[-1], config)


def default(dy: TensorSpec, x: TensorSpec, weight: TensorSpec) -> Config:
    return triton_norm_gradients.default(x)


def configs(dy: TensorSpec, x: TensorSpec, weight: TensorSpec) -> list[Config]:
    return triton_norm_gradients.configs(x)


def workspace(dy: TensorSpec, x: TensorSpec, weight: TensorSpec, config: Config) -> tuple[TensorSpec, ...]:
    return partial_sums(x, config), partial_sums(x, config)


@triton.jit(do_not_specialize=["m"])
def _layer_norm_backward(
    dy_ptr, x_ptr, w_ptr, dx_ptr, dw_ptr, db_ptr, dy_stride, x_stride, m, n, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    gradients(
        dy_ptr, x_ptr, w_ptr, None, dx_ptr, dw_ptr, db_ptr, dy_stride, x_stride, 1, 0, 0, m, n, eps, 0.0,
        ROWS, BLOCK, LONG, CENTRED=True,
    )  # fmt: skip


def _arguments(outs, sums, dy, x, weight, eps=1e-5):
    """Of tensors for `run` and of specs for `compile`."""
    m, n, stride = rows(x)
    return dy, x, weight, outs[0], *sums, rows(dy).stride, stride, m, n, float(eps)


def compile(specs, config: Config, arch: str) -> Artifact:
    arguments = _arguments(outputs(*specs), workspace(*specs, config), *specs)
    constants, options = triton_norm_gradients.options(config, specs[1].shape[-1]), {"num_warps": config.num_warps}
    return triton_glue.legacy_compile(_layer_norm_backward, arguments, constants, options, arch)


def run(outs, args, config: Config, *sums) -> None:
    triton_norm_gradients.run(_layer_norm_backward, _arguments(outs, sums, *args), config, sums, outs[1:])
