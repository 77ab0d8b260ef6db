"""Every block takes a piece of one row, or of all rows at once where they lie end to end; 16 bytes per access."""

import functools
from dataclasses import dataclass
from pathlib import Path

import torch

from tilery.base.spec import Artifact, TensorSpec
from tilery.hardware.device import ARCHS
from tilery.languages import cuda_glue
from tilery.parts.rows import joined, rows

archs = ARCHS

_SOURCE = Path(__file__).with_name("silu_mul.cu")


@dataclass(frozen=True)
class Config:
    threads: int  # in a block
    steps: int  # accesses of each thread


def refusal(gate: TensorSpec, up: TensorSpec | None, config: Config | None = None) -> str | None:
    if config and (config.threads % 32 or not 32 <= config.threads <= 1024):
        return f"threads must be a multiple of 32 up to 1024, got {config.threads}"
    if config and not 1 <= config.steps <= 8:
        return f"steps must be 1 to 8, got {config.steps}"
    return None


def default(gate: TensorSpec, up: TensorSpec | None) -> Config:
    return Config(threads=256, steps=1)


def configs(gate: TensorSpec, up: TensorSpec | None) -> list[Config]:
    return [Config(t, s) for t, s in ((128, 1), (128, 4), (256, 1), (256, 2), (256, 4), (512, 1), (512, 2))]


def _cut(gate, up) -> tuple[tuple, int, int, int, int]:
    """The tensors to be read, rows, values in a row, strides of gate and up; one long row where all lie end to end."""
    if up is None:
        m, n, stride = rows(gate)
        return (gate,), m, n // 2, stride, stride
    return (gate, up), *joined(gate, up)


@functools.cache
def _kernel(dtype: torch.dtype, values: int, config: Config) -> cuda_glue.Kernel:
    name = f"silu_mul<{cuda_glue.TYPES[dtype]}, {values}, {config.steps}, {config.threads}>"
    return cuda_glue.Kernel(_SOURCE, name, "PPPqqqi", config.threads, early=True)


def compile(specs, config: Config, arch: str) -> Artifact:
    tensors, _, n, *strides = _cut(*specs)
    return _kernel(tensors[0].dtype, cuda_glue.width(tensors, n, *strides), config).compile(arch)


def run(outs, args, config: Config) -> None:
    tensors, m, n, stride, up_stride = _cut(*args)
    gate = tensors[0]
    values = cuda_glue.width(tensors, n, stride, up_stride)
    pieces = -(-n // (values * config.steps * config.threads))
    start = gate.data_ptr()
    up_start = start + n * gate.itemsize if args[1] is None else args[1].data_ptr()
    _kernel(gate.dtype, values, config).launch(
        m * pieces, start, up_start, outs[0].data_ptr(), stride, up_stride, n, pieces
    )
