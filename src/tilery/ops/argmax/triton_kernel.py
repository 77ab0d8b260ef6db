"""One program per row, which it reads once, in blocks: every lane keeps its largest, and lanes are compared once."""

from dataclasses import dataclass

import triton
import triton.language as tl

from tilery.base.spec import Artifact, TensorSpec
from tilery.hardware.device import ARCHS
from tilery.languages import triton_glue
from tilery.languages.triton_glue import take_over
from tilery.ops.argmax import outputs
from tilery.parts.rows import rows
from tilery.parts.triton_order import first_of_largest, rank

archs = ARCHS


@dataclass(frozen=True)
class Config:
    block: int  # columns that a program holds at a time
    num_warps: int


def refusal(logits: TensorSpec, config: Config | None = None) -> str | None:
    if config and config.block > 32 * config.num_warps * 64:
        return f"block of {config.block} does not fit the registers of {config.num_warps} warps"
    return None


def default(logits: TensorSpec) -> Config:
    block = min(triton.next_power_of_2(logits.shape[-1]), 16384)
    return Config(block, num_warps=min(max(block // 512, 1), 16))


def configs(logits: TensorSpec) -> list[Config]:
    most = triton.next_power_of_2(logits.shape[-1])
    found = [Config(min(b, most), w) for b in (512, 4096, 8192, 16384, 32768) for w in (4, 8, 16, 32)]
    return [c for c in dict.fromkeys(found) if refusal(logits, c) is None]


@triton_glue.early
@triton.jit
def _argmax(x_ptr, y_ptr, x_stride, n, BLOCK: tl.constexpr):
    take_over()
    row = tl.program_id(0).to(tl.int64)  # int64: row * stride overflows int32 past 2**31 elements
    x_ptr += row * x_stride
    best = tl.full((BLOCK,), -(2**31), tl.int32)
    index = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, n, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        ranks = rank(tl.load(x_ptr + cols, mask=cols < n, other=0.0).to(tl.float32))
        better = (cols < n) & (ranks > best)
        best = tl.where(better, ranks, best)
        index = tl.where(better, cols, index)
    tl.store(y_ptr + row, first_of_largest(best, index))


def _arguments(outs, logits):
    """The launch arguments, of tensors for `run` and of specs for `compile`."""
    _, n, stride = rows(logits)
    return logits, outs[0], stride, n


def compile(specs, config: Config, arch: str) -> Artifact:
    arguments, options = _arguments(outputs(*specs), *specs), {"num_warps": config.num_warps}
    return triton_glue.legacy_compile(_argmax, arguments, {"BLOCK": config.block}, options, arch)


def run(outs, args, config: Config) -> None:
    arguments, options = _arguments(outs, *args), {"num_warps": config.num_warps}
    triton_glue.legacy_launch(_argmax, (rows(args[0]).m,), arguments, {"BLOCK": config.block}, options)
