"""One program per row; the whole row sits in registers, so x is read once."""

import triton
import triton.language as tl

from tilery.backends import triton_glue
from tilery.ops import triton_rows
from tilery.ops.rms_norm import outputs
from tilery.ops.rows import rows
from tilery.spec import Artifact, TensorSpec

archs = triton_rows.archs
Config = triton_rows.Config


def refusal(x: TensorSpec, weight: TensorSpec, config: Config | None = None) -> str | None:
    return triton_rows.refusal(x.shape[-1], config)


def default(x: TensorSpec, weight: TensorSpec) -> Config:
    return triton_rows.default(x.shape[-1])


def configs(x: TensorSpec, weight: TensorSpec) -> list[Config]:
    return triton_rows.configs(x.shape[-1])


@triton.jit
def _rms_norm(x_ptr, w_ptr, y_ptr, x_stride, n, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # int64: row * stride overflows int32 past 2**31 elements
    cols = tl.arange(0, BLOCK)
    mask = cols < n
    x = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, axis=0) / n + eps) * w
    tl.store(y_ptr + row * n + cols, y, mask=mask)


def _arguments(outs, x, weight, eps):
    """The launch arguments, of tensors for `run` and of specs for `compile`."""
    _, n, stride = rows(x)
    return (x, weight, outs[0], stride, n, eps), {"BLOCK": triton.next_power_of_2(n)}


def compile(specs, config: Config, arch: str) -> Artifact:
    arguments, constants = _arguments(outputs(*specs), *specs, 1e-6)
    return triton_glue.compile(_rms_norm, arguments, constants, {"num_warps": config.num_warps}, arch)


def run(outs, args, config: Config) -> None:
    arguments, constants = _arguments(outs, *args)
    _rms_norm[(rows(args[0]).m,)](*arguments, **constants, num_warps=config.num_warps)
