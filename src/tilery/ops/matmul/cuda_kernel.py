"""A ring of tiles in shared memory, filled by cp.async; tensor cores (mma.sync) for fp16 and bf16, FMAs for fp32."""

import functools
from dataclasses import dataclass
from pathlib import Path

import torch

from tilery.base.spec import Artifact, TensorSpec, Work
from tilery.hardware.device import ARCHS
from tilery.languages import cuda_glue
from tilery.ops.matmul import layout
from tilery.parts.tiles import tiled_product

archs = ARCHS

_SHARED = 99 * 1024  # bytes a block may have on sm_89 and sm_120; the others have more
_SOURCE = Path(__file__).with_name("matmul.cu")


@dataclass(frozen=True)
class Config:
    block_m: int
    block_n: int
    block_k: int
    warps_m: int  # along block_m
    warps_n: int
    stages: int  # tiles in the ring


_HALF = [
    Config(16, 64, 64, 1, 4, 4),
    Config(16, 128, 64, 1, 4, 4),
    Config(64, 64, 64, 2, 2, 4),
    Config(64, 128, 64, 2, 2, 3),
    Config(128, 128, 32, 2, 2, 4),
    Config(128, 128, 64, 2, 2, 3),
    Config(128, 256, 32, 2, 4, 3),
]
_SINGLE = [
    Config(32, 32, 32, 1, 2, 4),
    Config(64, 64, 32, 2, 2, 3),
    Config(64, 128, 16, 2, 2, 3),
    Config(128, 128, 16, 2, 4, 3),
]


def refusal(a: TensorSpec, b: TensorSpec, precision: str, config: Config | None = None) -> str | None:
    if config is None:
        return None
    blocks = config.block_m, config.block_n, config.block_k
    if config.block_m % (16 * config.warps_m) or config.block_n % (16 * config.warps_n) or config.block_k % 16:
        return f"every warp takes a multiple of 16 rows, columns and depth, got {config}"
    if any(block & (block - 1) for block in blocks) or config.stages < 2:
        return f"blocks must be powers of two and stages at least 2, got {config}"
    if 32 * config.warps_m * config.warps_n > 1024:
        return f"a block has at most 32 warps, got {config}"
    if (shared := _shared(a.dtype.itemsize, config)) > _SHARED:
        return f"needs {shared} bytes of shared memory, and a block may have {_SHARED}"
    return None


def default(a: TensorSpec, b: TensorSpec, precision: str) -> Config:
    m, n = a.shape[0], b.shape[1]
    if a.dtype == torch.float32:
        return _SINGLE[3] if m * n >= 2**21 else _SINGLE[1]
    if m <= 16:
        return _HALF[0]
    return _HALF[5] if m * n >= 2**21 else _HALF[2]  # 128 tiles of 128 x 128: enough for a large GPU


def configs(a: TensorSpec, b: TensorSpec, precision: str) -> list[Config]:
    return list(_SINGLE if a.dtype == torch.float32 else _HALF)


def estimate(a: TensorSpec, b: TensorSpec, precision: str, config: Config) -> Work:
    return tiled_product(a, b, config.block_m, config.block_n)


def _shared(itemsize: int, config: Config) -> int:
    """Bytes of the ring, which the tile of c passes through at the end."""
    ring = config.stages * (config.block_m + config.block_n) * config.block_k
    return max(ring, config.block_m * config.block_n) * itemsize


def _operand(x, inner: str) -> tuple[int, bool, bool]:
    """The stride between lines; whether K is contiguous, as in layout `inner`; whether 16 bytes can be fetched."""
    found = layout(x)
    outer = 0 if found == "n" else 1
    stride = x.stride(outer) if x.shape[outer] > 1 else 0
    return stride, found == inner, cuda_glue.width((x,), stride) > 1


@functools.cache
def _kernel(dtype: torch.dtype, config: Config, *layouts: bool) -> cuda_glue.Kernel:
    c, flags = config, ", ".join(map(str, layouts)).lower()
    tiles = f"{c.block_m}, {c.block_n}, {c.block_k}, {c.warps_m}, {c.warps_n}, {c.stages}"
    name = f"matmul<{cuda_glue.TYPES[dtype]}, {tiles}, {flags}>"
    return cuda_glue.Kernel(_SOURCE, name, "PPPqqiii", 32 * c.warps_m * c.warps_n, _shared(dtype.itemsize, c))


def compile(specs, config: Config, arch: str) -> Artifact:
    (_, *a_layout), (_, *b_layout) = _operand(specs[0], "n"), _operand(specs[1], "t")
    return _kernel(specs[0].dtype, config, *a_layout, *b_layout).compile(arch)


def run(outs, args, config: Config) -> None:
    a, b, _ = args
    (m, k), n = a.shape, b.shape[1]
    a_stride, *a_layout = _operand(a, "n")
    b_stride, *b_layout = _operand(b, "t")
    blocks = -(-m // config.block_m) * -(-n // config.block_n)
    kernel = _kernel(a.dtype, config, *a_layout, *b_layout)
    kernel.launch(blocks, a.data_ptr(), b.data_ptr(), outs[0].data_ptr(), a_stride, b_stride, m, n, k)
