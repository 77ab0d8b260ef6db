"""CUDA kernels that keep a row in the registers of one block, <op>, and loop where it is too long, <op>_long."""

import functools
from pathlib import Path
from typing import Any

import torch

from tilery.backends import cuda_glue
from tilery.parts import block_rows
from tilery.parts.block_rows import THREADS, Config


def kernel(
    source: Path, parameters: str, tensors: tuple[Any, ...], n: int, stride: int, threads: int
) -> cuda_glue.Kernel:
    """The instance for rows of n, of tensors for a launch and of specs to compile."""
    values = cuda_glue.width(tensors, n, stride)
    return _kernel(source, parameters, tensors[0].dtype, values, _steps(n, values, threads), threads)


@functools.cache  # few: rows of many lengths share an instance
def _kernel(
    source: Path, parameters: str, dtype: torch.dtype, values: int, steps: int | None, threads: int
) -> cuda_glue.Kernel:
    name = f"{source.stem}_long" if steps is None else source.stem
    sizes = (values, threads) if steps is None else (values, steps, threads)
    instance = f"{name}<{cuda_glue.TYPES[dtype]}, {', '.join(map(str, sizes))}>"
    return cuda_glue.Kernel(source, instance, parameters, threads)


def _steps(n: int, values: int, threads: int) -> int | None:
    """Accesses per thread; None where the row does not fit the registers: up to 255 a thread, 64 with 1024 threads."""
    steps = -(-n // (values * threads))
    return steps if steps * values <= min(64, 2**15 // threads) else None


def default(n: int) -> Config:
    return block_rows.default(n, most=1024)  # softmax of 4096 × 16384 on an H200: 75 µs, 88 with 512 threads


def configs(tensors: tuple[Any, ...], n: int, stride: int) -> list[Config]:
    """Few idle threads, and large blocks for long rows."""
    values = cuda_glue.width(tensors, n, stride)
    busy = [t for t in THREADS if t == THREADS[0] or t * values < 2 * n]
    return [Config(t) for t in busy if t >= 256 or _steps(n, values, t) is not None]
