"""matmul for every architecture: tiles pipelined through shared memory by cp.async.

fp16 and bf16 are multiplied by tensor cores (mma.sync), fp32 by FMAs.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from tilery.base.launch import Launch
from tilery.base.spec import TensorSpec, Work
from tilery.core.kernel import Kernel
from tilery.hardware.gpu import ARCHS
from tilery.languages.cuda_source import Source, vector_width
from tilery.ops.matmul.call import MatmulCall, gemm_work, layout

_SHARED = 99 * 1024  # bytes a block may have on sm_89 and sm_120; the others have more
_MATMUL = Source(Path(__file__).with_name("matmul.cu"), "matmul")


@dataclass(frozen=True)
class Config:
    block_m: int
    block_n: int
    block_k: int
    warps_m: int  # along block_m
    warps_n: int
    stages: int  # of the pipeline


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


class Matmul(Kernel):
    archs = ARCHS
    Config = Config

    def refusal(self, call: MatmulCall, config: Config | None = None) -> str | None:
        if config is None:
            return None
        blocks = config.block_m, config.block_n, config.block_k
        if config.block_m % (16 * config.warps_m) or config.block_n % (16 * config.warps_n) or config.block_k % 16:
            return f"every warp takes a multiple of 16 rows, columns and depth, got {config}"
        if any(block & (block - 1) for block in blocks) or config.stages < 2:
            return f"blocks must be powers of two and stages at least 2, got {config}"
        if 32 * config.warps_m * config.warps_n > 1024:
            return f"a block has at most 32 warps, got {config}"
        if (shared := _shared(call.a.dtype.itemsize, config)) > _SHARED:
            return f"needs {shared} bytes of shared memory, and a block may have {_SHARED}"
        return None

    def default(self, call: MatmulCall) -> Config:
        m, n = call.m, call.n
        if call.a.dtype == torch.float32:
            return _SINGLE[3] if m * n >= 2**21 else _SINGLE[1]
        if m <= 16:
            return _HALF[0]
        return _HALF[5] if m * n >= 2**21 else _HALF[2]  # 128 tiles of 128 x 128: enough for a large GPU

    def configs(self, call: MatmulCall) -> list[Config]:
        return list(_SINGLE if call.a.dtype == torch.float32 else _HALF)

    def estimate(self, call: MatmulCall, config: Config) -> Work:
        return gemm_work(call.m, call.n, call.k, call.a.dtype.itemsize, config.block_m, config.block_n)

    def launches(self, call: MatmulCall, config: Config) -> list[Launch]:
        a_stride, a_k_major, a_aligned = _operand(call.a, k_major="n")
        b_stride, b_k_major, b_aligned = _operand(call.b, k_major="t")
        args = {
            "a": call.a, "b": call.b, "c": call.c, "a_stride": a_stride, "b_stride": b_stride,
            "m": call.m, "n": call.n, "k": call.k,
        }  # fmt: skip
        constants = {
            "T": call.a.dtype, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k,
            "WARPS_M": config.warps_m, "WARPS_N": config.warps_n, "STAGES": config.stages,
            "A_K_MAJOR": a_k_major, "A_ALIGNED": a_aligned, "B_K_MAJOR": b_k_major, "B_ALIGNED": b_aligned,
        }  # fmt: skip
        options = {"threads": 32 * config.warps_m * config.warps_n}
        options["shared"] = _shared(call.a.dtype.itemsize, config)
        blocks = -(-call.m // config.block_m) * -(-call.n // config.block_n)
        return [Launch(_MATMUL, blocks, args, constants, options)]


def _shared(itemsize: int, config: Config) -> int:
    """Bytes of the stages, which the tile of c passes through at the end."""
    stages = config.stages * (config.block_m + config.block_n) * config.block_k
    return max(stages, config.block_m * config.block_n) * itemsize


def _operand(x: TensorSpec, k_major: str) -> tuple[int, bool, bool]:
    """The stride between lines; whether x has the layout `k_major`; whether 16 bytes can be loaded at a time."""
    found = layout(x)
    outer = 0 if found == "n" else 1
    stride = x.stride(outer) if x.shape[outer] > 1 else 0
    return stride, found == k_major, vector_width((x,), stride) > 1


matmul = Matmul()
