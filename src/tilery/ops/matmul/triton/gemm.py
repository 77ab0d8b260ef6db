"""matmul, matmul_add, linear and linear_silu_mul in Triton: a program per tile of the output.

Tiles of a and b stream through shared memory, and the compiler pipelines the loads. The epilogue works on the sums
while they are in registers.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tilery.base.launch import Launch
from tilery.base.spec import Work
from tilery.core.kernel import Kernel
from tilery.hardware.gpu import ARCHS, gpu
from tilery.ops.gated.triton_activations import factor
from tilery.ops.matmul.call import MatmulCall, gemm_work
from tilery.ops.matmul.triton.tiles import Matrix, grouped_tile


@triton.jit
def _activated(y, ACT: tl.constexpr):
    if ACT == "relu":
        return tl.where(y < 0, 0.0, y)  # written so that NaN stays
    if ACT == "silu":
        return y * factor(y, "silu")
    if ACT == "gelu":
        return y * factor(y, "none")
    if ACT == "gelu_tanh":
        return y * factor(y, "tanh")
    return y


@triton.jit
def _gemm(
    a, b, addend, bias_ptr, out_ptr, M, N, K, alpha, beta,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr, INT64: tl.constexpr, ACT: tl.constexpr, PRECISION: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """a, b and addend are `Matrix`. HALVES = 2: b has 2N columns, of gate and then of up."""
    i, j = grouped_tile(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    m, n, k = i * BLOCK_M + tl.arange(0, BLOCK_M), j * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)

    step = tl.full((), BLOCK_K, tl.int64 if INT64 else tl.int32)
    if INT64:  # row * stride overflows int32 past 2**31 elements
        m, n, k = m.to(tl.int64), n.to(tl.int64), k.to(tl.int64)
    a_ptrs = a.ptr + (m[:, None] * a.row + k[None, :] * a.column)
    b_ptrs = b.ptr + (k[:, None] * b.row + n[None, :] * b.column)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if HALVES == 2:
        up_ptrs = b_ptrs + tl.full((), 1, tl.int64) * N * b.column
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        a_mask, b_mask = m[:, None] < M, n[None, :] < N
        if not EVEN_K:
            a_mask, b_mask = a_mask & (k[None, :] < K - start), b_mask & (k[:, None] < K - start)
        a_tile = tl.load(a_ptrs, mask=a_mask, other=0.0)
        b_tile = tl.load(b_ptrs, mask=b_mask, other=0.0)
        acc = tl.dot(a_tile, b_tile, acc, input_precision=PRECISION)  # fp32 stays fp32 unless asked: tf32 loses 13 bits
        if HALVES == 2:
            up = tl.dot(a_tile, tl.load(up_ptrs, mask=b_mask, other=0.0), up, input_precision=PRECISION)
            up_ptrs += step * b.row
        a_ptrs += step * a.column
        b_ptrs += step * b.row

    mask = (m[:, None] < M) & (n[None, :] < N)
    if alpha is not None:
        acc *= alpha
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    acc = _activated(acc, ACT)
    if HALVES == 2:
        acc *= up
    if addend.ptr is not None:
        addend_ptrs = addend.ptr + (m[:, None] * addend.row + n[None, :] * addend.column)
        if beta is not None:
            acc += beta * tl.load(addend_ptrs, mask=mask & (beta != 0), other=0.0).to(tl.float32)
        else:
            acc += tl.load(addend_ptrs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + (m[:, None] * N + n[None, :]), acc, mask=mask)


@dataclass(frozen=True)
class Config:
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8  # rows of tiles that run together and share b in L2


_TILES = (  # block_m, block_n (of gate and up together), block_k, warps
    (16, 64, 128, 4),
    (32, 64, 128, 4),
    (64, 64, 128, 4),
    (64, 128, 64, 4),
    (128, 128, 64, 8),
    (128, 256, 64, 8),
)


class Gemm(Kernel):
    archs = ARCHS
    Config = Config

    def refusal(self, call: MatmulCall, config: Config | None = None) -> str | None:
        if config is None:
            return None
        limit, rows = gpu(call.a.device).shared_per_block, config.block_m + call.halves * config.block_n
        need = config.num_stages * rows * config.block_k * call.a.dtype.itemsize
        if need > limit:
            return f"{config} needs {need} bytes of shared memory, a block has {limit}"
        return None

    def default(self, call: MatmulCall) -> Config:
        """Gate and up take half of a tile's columns each."""
        m, wide = call.m, 64 // call.halves
        if call.a.dtype == torch.float32:
            if call.precision == "tf32" and m > 64:
                return Config(128, 2 * wide, 32, num_warps=8, num_stages=3)
            return Config(64, wide, 32, num_warps=8, num_stages=2)
        vectors = _loads_vectors(call)
        if m <= 32:  # few rows: narrow tiles, so that there are enough of them
            return Config(16 if m <= 16 else 32, wide, 128 if vectors else 64, num_warps=4, num_stages=4)
        if not vectors:
            return Config(128, 2 * wide, 32, num_warps=8, num_stages=2) if m > 128 else Config(64, wide, 32, 4, 2)
        if m <= 128:
            return Config(64, wide, 128, num_warps=4, num_stages=3)
        return Config(128, 2 * wide, 64, num_warps=8, num_stages=3)  # 4096³ on an H200: 201 µs, 128 × 256 takes 263

    def configs(self, call: MatmulCall) -> list[Config]:
        found = [Config(m, n // call.halves, k, warps, stages) for m, n, k, warps in _TILES for stages in (2, 3, 4)]
        return [c for c in found if self.refusal(call, c) is None]

    def estimate(self, call: MatmulCall, config: Config) -> Work:
        """The addend is left out: a tile of it costs next to nothing."""
        columns, width = call.halves * call.n, call.halves * config.block_n
        return gemm_work(call.m, columns, call.k, call.a.dtype.itemsize, config.block_m, width)

    def launches(self, call: MatmulCall, config: Config) -> list[Launch]:
        m, n, k = call.m, call.n, call.k
        args = {
            "a": Matrix(call.a, *call.a_strides), "b": Matrix(call.b, *call.b_strides),
            "addend": Matrix(call.addend, *call.addend_strides), "bias_ptr": call.bias, "out_ptr": call.out,
            "M": m, "N": n, "K": k, "alpha": call.alpha, "beta": call.beta,
        }  # fmt: skip
        constants = {
            "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "GROUP_M": config.group_m,
            "EVEN_K": k % config.block_k == 0, "INT64": _reach(call) >= 2**30,
            "ACT": call.act, "PRECISION": call.precision, "HALVES": call.halves,
        }  # fmt: skip
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        grid = triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n)
        return [Launch(_gemm, grid, args, constants, options)]


def _loads_vectors(call: MatmulCall) -> bool:
    """Whether Triton can tell that 16 bytes may be loaded at a time; where not, deep tiles spill registers."""
    a, b = call.a_strides, call.b_strides
    contiguous = call.m if a.row == 1 else call.k, call.n if b.column == 1 else call.k  # sizes that masks depend on
    return call.a.aligned and call.b.aligned and all(size == 1 or size % 16 == 0 for size in (*contiguous, *a, *b))


def _reach(call: MatmulCall) -> int:
    """Elements from the first of a matrix to its last; a tile may reach past that, by less than as far again."""
    a, b, addend = call.a_strides, call.b_strides, call.addend_strides
    return max(
        call.m * a.row + call.k * a.column, call.k * b.row + call.halves * call.n * b.column,
        call.m * addend.row + call.n * addend.column, call.m * call.n,
    )  # fmt: skip


gemm = Gemm()
