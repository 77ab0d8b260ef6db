"""A fixed number of programs take turns at the rows, held in registers; their sums of dweight are added in order."""

import triton
import triton.language as tl

from tilery.base.spec import Artifact, TensorSpec
from tilery.languages import triton_glue
from tilery.ops.rms_norm_backward import outputs
from tilery.parts import triton_norm_gradients, triton_norms
from tilery.parts.rows import heads, rows
from tilery.parts.triton_norm_gradients import Config, gradients, partial_sums

archs = triton_norms.archs


def refusal(dy: TensorSpec, x: TensorSpec, weight: TensorSpec, config: Config | None = None) -> str | None:
    return triton_norm_gradients.refusal(x.shape[-1], config)


def default(dy: TensorSpec, x: TensorSpec, weight: TensorSpec) -> Config:
    return triton_norm_gradients.default(x)


def configs(dy: TensorSpec, x: TensorSpec, weight: TensorSpec) -> list[Config]:
    return triton_norm_gradients.configs(x)


def workspace(dy: TensorSpec, x: TensorSpec, weight: TensorSpec, config: Config) -> tuple[TensorSpec, ...]:
    return (partial_sums(x, config),)


@triton.jit(do_not_specialize=["m"])
def _rms_norm_backward(
    dy_ptr, x_ptr, w_ptr, dx_ptr, dw_ptr, dy_stride, x_stride, heads, step, m, n, eps, offset,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    gradients(
        dy_ptr, x_ptr, w_ptr, None, dx_ptr, dw_ptr, None, dy_stride, x_stride, heads, step, 0, m, n, eps, offset,
        ROWS, BLOCK, LONG,
    )  # fmt: skip


def _arguments(outs, sums, dy, x, weight, eps=1e-6, offset=0.0):
    """Of tensors for `run` and of specs for `compile`."""
    m, n, stride, count, step = heads(x)
    return dy, x, weight, outs[0], sums, rows(dy).stride, stride, count, step, m, n, float(eps), float(offset)


def compile(specs, config: Config, arch: str) -> Artifact:
    arguments = _arguments(outputs(*specs), partial_sums(specs[1], config), *specs)
    constants, options = triton_norm_gradients.options(config, specs[1].shape[-1]), {"num_warps": config.num_warps}
    return triton_glue.legacy_compile(_rms_norm_backward, arguments, constants, options, arch)


def run(outs, args, config: Config, sums) -> None:
    arguments = _arguments(outs, sums, *args)
    triton_norm_gradients.run(_rms_norm_backward, arguments, config, (sums,), outs[1:])
