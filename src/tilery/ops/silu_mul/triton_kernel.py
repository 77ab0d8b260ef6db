"""A program takes a block of one row: nothing is shared between elements, so any cut will do."""

from dataclasses import dataclass

import triton
import triton.language as tl

from tilery.backends import triton_glue
from tilery.device import ARCHS
from tilery.ops.rows import rows
from tilery.ops.silu_mul import outputs
from tilery.spec import Artifact, TensorSpec

archs = ARCHS


@dataclass(frozen=True)
class Config:
    block: int
    num_warps: int


def refusal(gate: TensorSpec, up: TensorSpec, config: Config | None = None) -> str | None:
    return None


def default(gate: TensorSpec, up: TensorSpec) -> Config:
    return Config(block=min(triton.next_power_of_2(gate.shape[-1]), 1024), num_warps=4)


def configs(gate: TensorSpec, up: TensorSpec) -> list[Config]:
    return [Config(block, warps) for block in (512, 1024, 2048, 4096) for warps in (4, 8)]


@triton.jit
def _silu_mul(g_ptr, u_ptr, y_ptr, g_stride, u_stride, n, BLOCK: tl.constexpr):
    blocks = tl.cdiv(n, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)  # int64: row * stride overflows int32 past 2**31 elements
    cols = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = cols < n
    g = tl.load(g_ptr + row * g_stride + cols, mask=mask).to(tl.float32)
    u = tl.load(u_ptr + row * u_stride + cols, mask=mask).to(tl.float32)
    tl.store(y_ptr + row * n + cols, g / (1 + tl.exp(-g)) * u, mask=mask)


def _arguments(outs, gate, up):
    """The launch arguments, of tensors for `run` and of specs for `compile`."""
    return gate, up, outs[0], rows(gate).stride, rows(up).stride, gate.shape[-1]


def compile(specs, config: Config, arch: str) -> Artifact:
    arguments, constants = _arguments(outputs(*specs), *specs), {"BLOCK": config.block}
    return triton_glue.compile(_silu_mul, arguments, constants, {"num_warps": config.num_warps}, arch)


def run(outs, args, config: Config) -> None:
    m, n, _ = rows(args[0])
    grid = (m * triton.cdiv(n, config.block),)
    _silu_mul[grid](*_arguments(outs, *args), BLOCK=config.block, num_warps=config.num_warps)
