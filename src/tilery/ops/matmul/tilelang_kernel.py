"""A block per tile of c: T.Pipelined keeps copies in flight under T.gemm; on sm_90 TMA, wgmma and warps for each."""

from dataclasses import dataclass

import tilelang.language as T
import torch

from tilery.base.spec import Artifact, TensorSpec, Work, dtype_name
from tilery.hardware import device
from tilery.hardware.device import ARCHS
from tilery.languages import tilelang_glue
from tilery.ops.matmul import layout
from tilery.parts.tiles import tiled_product

archs = ARCHS


@dataclass(frozen=True)
class Config:
    block_m: int
    block_n: int
    block_k: int
    stages: int
    threads: int  # that multiply; with TMA 128 more fetch
    panel: int = 8  # tiles of a column band that run together and share b in L2


_CONFIGS = (
    Config(16, 64, 128, stages=4, threads=128),
    Config(32, 64, 128, stages=4, threads=128),
    Config(64, 64, 128, stages=3, threads=128),
    Config(64, 128, 64, stages=4, threads=128),
    Config(128, 128, 64, stages=3, threads=256),
    Config(128, 128, 64, stages=4, threads=256),
    Config(128, 256, 64, stages=3, threads=256),
    Config(128, 256, 64, stages=4, threads=256),
    Config(256, 128, 64, stages=3, threads=256),
)


def refusal(a: TensorSpec, b: TensorSpec, precision: str, config: Config | None = None) -> str | None:
    if a.dtype not in (torch.float16, torch.bfloat16):
        return f"T.gemm takes fp16 and bf16, and would round {dtype_name(a.dtype)} to tf32"
    if config is None:
        return None
    limit, need = device.shared_limit(device.arch(a.device)), _shared(config)
    return f"{config} needs {need} bytes of shared memory, a block has {limit}" if need > limit else None


def _shared(config: Config) -> int:
    """c's tile takes the place of a's and b's, which start on 1024 bytes, after the barriers."""
    ring = config.stages * (config.block_m + config.block_n) * config.block_k
    return 2 * max(ring, config.block_m * config.block_n) + 1024


def default(a: TensorSpec, b: TensorSpec, precision: str) -> Config:
    m, n = a.shape[0], b.shape[1]
    if m <= 128:
        return _CONFIGS[0 if m <= 16 else 1 if m <= 32 else 2]
    # The wide tile where there is shared memory for it and there are enough of them to fill a GPU.
    return _CONFIGS[6 if device.arch(a.device) in ("sm_90", "sm_100") and m * n >= 2**22 else 4]


def configs(a: TensorSpec, b: TensorSpec, precision: str) -> list[Config]:
    tall = a.shape[0] > 64
    near = [c for c in _CONFIGS if (c.block_m >= 64 if tall else c.block_m <= 64)]
    return [c for c in near if refusal(a, b, precision, c) is None]


def estimate(a: TensorSpec, b: TensorSpec, precision: str, config: Config) -> Work:
    return tiled_product(a, b, config.block_m, config.block_n)


def _matmul(n: int, k: int, dtype: str, trans_a: bool, trans_b: bool, even: bool, config: Config):
    m, lda, ldb = T.dynamic("m"), T.dynamic("lda", "int64"), T.dynamic("ldb", "int64")
    bm, bn, bk = config.block_m, config.block_n, config.block_k
    stages = config.stages if even else 0  # element by element there is nothing asynchronous to pipeline

    @T.prim_func
    def matmul(
        a: T.StridedTensor((k, m) if trans_a else (m, k), (lda, 1), dtype),
        b: T.StridedTensor((n, k) if trans_b else (k, n), (ldb, 1), dtype),
        c: T.Tensor((m, n), dtype),
    ):
        with T.Kernel(T.ceildiv(m, bm), T.ceildiv(n, bn), threads=config.threads) as (i, j):
            if even:  # what makes 16-byte copies of the loads below
                T.assume(lda % 8 == 0)
                T.assume(ldb % 8 == 0)
                if trans_a:
                    T.assume(m % 8 == 0)
            a_tile = T.alloc_shared((bk, bm) if trans_a else (bm, bk), dtype)
            b_tile = T.alloc_shared((bn, bk) if trans_b else (bk, bn), dtype)
            c_tile = T.alloc_shared((bm, bn), dtype)
            acc = T.alloc_fragment((bm, bn), "float32")
            T.use_swizzle(config.panel, order="column")
            T.clear(acc)
            for step in T.Pipelined(T.ceildiv(k, bk), num_stages=stages):  # copies give zeros outside a and b
                if trans_a:
                    T.copy(a[step * bk, i * bm], a_tile, disable_tma=not even)
                else:
                    T.copy(a[i * bm, step * bk], a_tile, disable_tma=not even)
                if trans_b:
                    T.copy(b[j * bn, step * bk], b_tile, disable_tma=not even)
                else:
                    T.copy(b[step * bk, j * bn], b_tile, disable_tma=not even)
                T.gemm(a_tile, b_tile, acc, transpose_A=trans_a, transpose_B=trans_b)
            T.copy(acc, c_tile)
            T.copy(c_tile, c[i * bm, j * bn])

    return matmul


def _even(x, aligned: bool) -> bool:
    """May copies take 16 bytes at a time, and TMA describe x? Start, length and distance of rows must be multiples."""
    length, distance = (x.shape[1], x.stride(0)) if layout(x) == "n" else (x.shape[0], x.stride(1))
    return aligned and length % 8 == 0 and distance % 8 == 0 and distance >= length


def _constants(a, b, even: bool, config: Config):
    return b.shape[1], a.shape[1], tilelang_glue.NAMES[a.dtype], layout(a) == "t", layout(b) == "t", even, config


def compile(specs, config: Config, arch: str) -> Artifact:
    a, b, _ = specs
    even = _even(a, a.aligned) and _even(b, b.aligned)
    return tilelang_glue.legacy_compile(_matmul, _constants(a, b, even, config), arch)


def run(outs, args, config: Config) -> None:
    a, b, _ = args
    if not a.shape[1]:  # there is no tile to describe
        outs[0].zero_()
        return
    even = _even(a, a.data_ptr() % 16 == 0) and _even(b, b.data_ptr() % 16 == 0)
    constants = _constants(a, b, even, config)
    a, b = (x.t() if layout(x) == "t" else x for x in (a, b))
    tilelang_glue.legacy_launch(_matmul, constants, (a, b, outs[0]))
