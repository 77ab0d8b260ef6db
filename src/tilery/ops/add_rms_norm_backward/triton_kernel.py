"""A fixed number of programs take turns at the rows, held in registers; their sums of dweight are added in order."""

import triton
import triton.language as tl

from tilery.base.spec import Artifact, TensorSpec
from tilery.languages import triton_glue
from tilery.ops.add_rms_norm_backward import outputs
from tilery.parts import triton_norm_gradients, triton_norms
from tilery.parts.rows import rows
from tilery.parts.triton_norm_gradients import Config, gradients, partial_sums

archs = triton_norms.archs


def refusal(dy, dresidual, residual_out: TensorSpec, weight, config: Config | None = None) -> str | None:
    return triton_norm_gradients.refusal(residual_out.shape[-1], config)


def default(dy, dresidual, residual_out: TensorSpec, weight) -> Config:
    return triton_norm_gradients.default(residual_out)


def configs(dy, dresidual, residual_out: TensorSpec, weight) -> list[Config]:
    return triton_norm_gradients.configs(residual_out)


def workspace(dy, dresidual, residual_out: TensorSpec, weight, config: Config) -> tuple[TensorSpec, ...]:
    return (partial_sums(residual_out, config),)


@triton.jit(do_not_specialize=["m"])
def _add_rms_norm_backward(
    dy_ptr, r_ptr, x_ptr, w_ptr, dx_ptr, dw_ptr, dy_stride, r_stride, x_stride, m, n, eps, offset,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    gradients(
        dy_ptr, x_ptr, w_ptr, r_ptr, dx_ptr, dw_ptr, None, dy_stride, x_stride, 1, 0, r_stride, m, n, eps, offset,
        ROWS, BLOCK, LONG,
    )  # fmt: skip


def _arguments(outs, sums, dy, dresidual, total, weight, eps=1e-6, offset=0.0):
    """Of tensors for `run` and of specs for `compile`."""
    m, n, stride = rows(total)
    strides = rows(dy).stride, 0 if dresidual is None else rows(dresidual).stride, stride
    return dy, dresidual, total, weight, outs[0], sums, *strides, m, n, float(eps), float(offset)


def compile(specs, config: Config, arch: str) -> Artifact:
    arguments = _arguments(outputs(*specs), partial_sums(specs[2], config), *specs)
    constants, options = triton_norm_gradients.options(config, specs[2].shape[-1]), {"num_warps": config.num_warps}
    return triton_glue.legacy_compile(_add_rms_norm_backward, arguments, constants, options, arch)


def run(outs, args, config: Config, sums) -> None:
    arguments = _arguments(outs, sums, *args)
    triton_norm_gradients.run(_add_rms_norm_backward, arguments, config, (sums,), outs[1:])
