"""matmul in TileLang: T.Pipelined keeps copies in flight under T.gemm; on sm_90 TMA, wgmma and warps for each."""

from dataclasses import dataclass

import tilelang.language as T
import torch
from torch import Tensor

from tilery.base.launch import Argument, Host, Launch
from tilery.base.spec import TensorSpec, Work, dtype_name
from tilery.core.kernel import Kernel
from tilery.hardware.gpu import ARCHS, gpu
from tilery.languages import tilelang_glue
from tilery.ops.matmul.call import MatmulCall, gemm_work, layout


@dataclass(frozen=True)
class Config:
    block_m: int
    block_n: int
    block_k: int
    stages: int
    threads: int  # that multiply; with TMA 128 more load
    panel: int = 8  # rows of tiles that run together and share b in L2, as TileLang's swizzle counts them


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


def _matmul(n: int, k: int, dtype: str, trans_a: bool, trans_b: bool, even: bool, config: Config):
    m, lda, ldb = T.dynamic("m"), T.dynamic("lda", "int64"), T.dynamic("ldb", "int64")
    bm, bn, bk = config.block_m, config.block_n, config.block_k
    stages = config.stages if even else 0  # element by element there is nothing asynchronous to pipeline
    rows_a, rows_b = k if trans_a else m, n if trans_b else k
    if not even:  # of a single row TileLang would load 16 bytes at a time, from where that may not be aligned
        rows_a, rows_b = T.dynamic("rows_a") if trans_a else m, T.dynamic("rows_b")

    @T.prim_func
    def matmul(
        a: T.StridedTensor((rows_a, m if trans_a else k), (lda, 1), dtype),
        b: T.StridedTensor((rows_b, k if trans_b else n), (ldb, 1), dtype),
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


class Matmul(Kernel):
    archs = ARCHS
    Config = Config

    def refusal(self, call: MatmulCall, config: Config | None = None) -> str | None:
        if call.a.dtype not in (torch.float16, torch.bfloat16):
            return f"T.gemm takes fp16 and bf16, and would round {dtype_name(call.a.dtype)} to tf32"
        if config is None:
            return None
        limit, need = gpu(call.a.device).shared_per_block, _shared(config)
        return f"{config} needs {need} bytes of shared memory, a block has {limit}" if need > limit else None

    def default(self, call: MatmulCall) -> Config:
        m, n = call.m, call.n
        if m <= 128:
            return _CONFIGS[0 if m <= 16 else 1 if m <= 32 else 2]
        # The wide tile where a block has shared memory for it with four stages, and there are enough to fill a GPU.
        roomy = gpu(call.a.device).shared_per_block >= _shared(_CONFIGS[7])
        return _CONFIGS[6 if roomy and m * n >= 2**22 else 4]

    def configs(self, call: MatmulCall) -> list[Config]:
        tall = call.m > 64
        near = [c for c in _CONFIGS if (c.block_m >= 64 if tall else c.block_m <= 64)]
        return [c for c in near if self.refusal(call, c) is None]

    def estimate(self, call: MatmulCall, config: Config) -> Work:
        return gemm_work(call.m, call.n, call.k, call.a.dtype.itemsize, config.block_m, config.block_n)

    def launches(self, call: MatmulCall, config: Config) -> list[Launch | Host]:
        if not call.k:  # there is no tile to describe
            return [Host(Tensor.zero_, (call.c,))]
        a, b, c = call.a, call.b, call.c
        constants = {
            "n": call.n, "k": call.k, "dtype": tilelang_glue.NAMES[a.dtype],
            "trans_a": layout(a) == "t", "trans_b": layout(b) == "t", "even": _even(a) and _even(b), "config": config,
        }  # fmt: skip
        return [Launch(_matmul, 1, {"a": _row_major(a), "b": _row_major(b), "c": c}, constants)]


def _shared(config: Config) -> int:
    """Bytes. c's tile takes the place of a's and b's, which start on 1024 bytes, after the barriers."""
    stages = config.stages * (config.block_m + config.block_n) * config.block_k
    return 2 * max(stages, config.block_m * config.block_n) + 1024


def _even(x: TensorSpec) -> bool:
    """May copies take 16 bytes at a time, and TMA describe x? Start, length and distance of rows must be multiples."""
    length, distance = (x.shape[1], x.stride(0)) if layout(x) == "n" else (x.shape[0], x.stride(1))
    return x.aligned and length % 8 == 0 and distance % 8 == 0 and distance >= length


def _row_major(x: Argument) -> Argument:
    """x, or its transpose where columns are contiguous."""
    return x if layout(x) == "n" else x._replace(shape=x.shape[::-1], strides=x.strides[::-1])


matmul = Matmul()
