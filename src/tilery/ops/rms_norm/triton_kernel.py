"""One program per row; the whole row sits in registers, so x is read once."""

from dataclasses import dataclass

import triton
import triton.language as tl

from tilery.backends import triton_glue
from tilery.op import Artifact, TensorSpec
from tilery.ops.rms_norm import outputs
from tilery.ops.rows import rows

archs = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")

_WARPS = (1, 2, 4, 8, 16)
_VALUES_PER_LANE = 128  # of 255 registers; the rest hold the weight and the addresses


@dataclass(frozen=True)
class Config:
    num_warps: int


def refusal(x: TensorSpec, weight: TensorSpec, config: Config | None = None) -> str | None:
    n = x.shape[-1]
    most = 32 * (config.num_warps if config else _WARPS[-1]) * _VALUES_PER_LANE
    if triton.next_power_of_2(n) > most:
        return f"row of {n} does not fit the registers of one program ({most} values)"
    return None


def default(x: TensorSpec, weight: TensorSpec) -> Config:
    return Config(num_warps=min(max(triton.next_power_of_2(x.shape[-1]) // 512, 1), _WARPS[-1]))


def configs(x: TensorSpec, weight: TensorSpec) -> list[Config]:
    return [c for c in map(Config, _WARPS) if refusal(x, weight, c) is None]


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
