"""fp8_matmul and fp8_matmul_rowwise in Triton: a program per tile of c and part of K (split-K).

Every 128 products of fp8 are added by the tensor cores, which keep few bits, then scaled and added in fp32. Without
tensor cores for fp8 (sm_80, the interpreter) values are widened to fp16 first: that is exact. A second launch adds up
the parts of K.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from tilery.base.integers import ceil_div
from tilery.base.launch import Host, Launch
from tilery.base.spec import DTYPES, TensorSpec, Work
from tilery.core.kernel import Kernel
from tilery.hardware.gpu import ARCHS, gpu
from tilery.ops.fp8_matmul.call import Fp8MatmulCall
from tilery.ops.fp8_matmul.split_k import split_k_work, split_k_workspace
from tilery.ops.matmul.triton.tiles import grouped_tile
from tilery.ops.quantize import triton_fp8
from tilery.ops.quantize.formats import GROUP, LARGEST
from tilery.ops.quantize.triton_fp8 import widen

_K = tl.constexpr(GROUP)
_FORMATS = {DTYPES[format]: format for format in LARGEST}
_ADDED = 1024  # elements of c that a program of the second launch adds up


class Scaled(NamedTuple):
    """A matrix [rows, K] of contiguous rows and its scales, as an argument of a kernel; strides in elements."""

    ptr: Any
    row: Any
    scale_ptr: Any
    scale_row: Any
    scale_column: Any


@triton.jit
def _operand(ptrs, k, left, FORMAT: tl.constexpr, NATIVE: tl.constexpr, EVEN_K: tl.constexpr):
    """A tile as the tensor cores take it; `left` columns from its first on are inside the matrix, k numbers them."""
    x = tl.load(ptrs) if EVEN_K else tl.load(ptrs, mask=k < left, other=0.0)
    return x if NATIVE else widen(x, FORMAT, NATIVE).to(tl.float16)


@triton.jit
def _fp8_gemm(
    a, b, c_ptr, M, N, K, steps,
    A_FORMAT: tl.constexpr, B_FORMAT: tl.constexpr, NATIVE: tl.constexpr,
    B_ROWS_PER_SCALE: tl.constexpr, GROUPED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr, EVEN_K: tl.constexpr, INT64: tl.constexpr,
):  # fmt: skip
    """a and b are `Scaled`. A program has `steps` blocks of K. GROUPED: every block has scales of its own."""
    i, j = grouped_tile(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    n_first = j * BLOCK_N
    m, n, k = i * BLOCK_M + tl.arange(0, BLOCK_M), n_first + tl.arange(0, BLOCK_N), tl.arange(0, _K)
    if INT64:  # row * stride overflows int32 past 2**31 elements
        m, n, n_first = m.to(tl.int64), n.to(tl.int64), n_first.to(tl.int64)
    # Past the edges the last row and column are read again: a load without a mask is the faster.
    m_read, n_read = tl.minimum(m, M - 1), tl.minimum(n, N - 1)
    first = tl.program_id(1) * steps
    a_ptrs = a.ptr + first * _K + (m_read[:, None] * a.row + k[None, :])
    b_ptrs = b.ptr + first * _K + (n_read[None, :] * b.row + k[:, None])
    a_scales, b_scales = a.scale_ptr + m_read * a.scale_row, b.scale_ptr + n_read // B_ROWS_PER_SCALE * b.scale_row
    b_one = b.scale_ptr + n_first // B_ROWS_PER_SCALE * b.scale_row

    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for block in range(first, min(first + steps, tl.cdiv(K, _K))):
        group = tl.cast(block, tl.int64) if INT64 else block
        a_tile = _operand(a_ptrs, k[None, :], K - block * _K, A_FORMAT, NATIVE, EVEN_K)
        b_tile = _operand(b_ptrs, k[:, None], K - block * _K, B_FORMAT, NATIVE, EVEN_K)
        if not GROUPED:
            acc = tl.dot(a_tile, b_tile, acc, max_num_imprecise_acc=_K)
        elif BLOCK_N <= _K:  # one scale of b for the tile
            scale = tl.load(a_scales + group * a.scale_column) * tl.load(b_one + group * b.scale_column)
            acc += tl.dot(a_tile, b_tile) * scale[:, None]
        else:
            scale = tl.load(a_scales + group * a.scale_column)
            acc += tl.dot(a_tile, b_tile) * (scale[:, None] * tl.load(b_scales + group * b.scale_column)[None, :])
        a_ptrs += _K
        b_ptrs += _K
    if not GROUPED:
        acc *= tl.load(a_scales)[:, None] * tl.load(b_scales)[None, :]
    c_ptr += tl.program_id(1).to(tl.int64) * M * N
    tl.store(c_ptr + (m[:, None] * N + n[None, :]), acc, mask=(m[:, None] < M) & (n[None, :] < N))


@triton.jit
def _add_parts(part_ptr, c_ptr, size, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """c = the parts, always added in the same order: ten runs give the same bits."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(part_ptr + part * size + index, mask=index < size, other=0.0)
    tl.store(c_ptr + index, total, mask=index < size)


@dataclass(frozen=True)
class Config:
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    split_k: int = 1  # programs that share a tile of c, each with a part of K
    group_m: int = 8  # rows of tiles that run together and share b in L2
    block_k: int = GROUP  # as far as a scale goes

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


_TILES = (  # with their warps; 128 × 256 and 256 × 128 spill on sm_90, the products of a block beside the sum
    (16, 64, 4),
    (16, 128, 4),
    (32, 64, 4),
    (32, 128, 4),
    (64, 64, 4),
    (64, 128, 4),
    (128, 64, 4),
    (128, 128, 8),
)
_FEW_ROWS = 256  # up to here configs split K too


class Fp8Gemm(Kernel):
    archs = ARCHS
    Config = Config

    def refusal(self, call: Fp8MatmulCall, config: Config | None = None) -> str | None:
        if config is None:
            return None
        sizes = config.block_m, config.block_n, config.split_k
        if any(size < 1 or size & (size - 1) for size in sizes) or min(sizes[:2]) < 16:
            return f"block_m and block_n must be powers of two from 16 on, split_k one from 1 on, got {config}"
        if config.block_k != GROUP:
            return f"block_k must be {GROUP}, as far as a scale goes, got {config.block_k}"
        if config.split_k > (most := max(call.k // GROUP, 1)):
            return f"split_k must be at most {most}, the blocks of {GROUP} in K, got {config.split_k}"
        limit, need = gpu(call.a.device).shared_per_block, config.num_stages * _stage(config.block_m, config.block_n)
        if need > limit:
            return f"{config} needs {need} bytes of shared memory, a block has {limit}"
        return None

    def default(self, call: Fp8MatmulCall) -> Config:
        if call.m <= 16:
            block_m, block_n, warps = 16, 64, 4
        elif call.m <= 64:
            block_m, block_n, warps = 64, 64, 4
        else:
            block_m, block_n, warps = 128, 128, 8
        card, split = gpu(call.a.device), 1
        most, tiles = card.shared_per_block // _stage(block_m, block_n), _tiles(call, block_m, block_n)
        # Fewer tiles than SMs are split along K; a part has eight blocks or more.
        while 0 < tiles * split * 2 <= card.sms and call.k >= 8 * GROUP * split * 2:
            split *= 2
        return Config(block_m, block_n, warps, num_stages=min(4, most), split_k=split)

    def configs(self, call: Fp8MatmulCall) -> list[Config]:
        splits = (1, 2, 4, 8) if call.m <= _FEW_ROWS else (1,)
        found = [Config(*tile, stages, split) for split in splits for tile in _TILES for stages in (3, 4, 6)]
        return [c for c in found if self.refusal(call, c) is None]

    def estimate(self, call: Fp8MatmulCall, config: Config) -> Work:
        return split_k_work(call, config.block_m, config.block_n, config.split_k)

    def workspace(self, call: Fp8MatmulCall, config: Config) -> dict[str, TensorSpec]:
        return split_k_workspace(call, config.split_k)

    def launches(self, call: Fp8MatmulCall, config: Config) -> list[Launch | Host]:
        m, n, k = call.m, call.n, call.k
        if not k:  # a sum of nothing is zero, whatever its scales are
            return [Host(Tensor.zero_, (call.c,))]
        a, b, native = call.a, call.b, triton_fp8.native(call.a.device)
        (_, *a_scale_strides), (b_rows_per_scale, *b_scale_strides) = call.a_scale_strides, call.b_scale_strides
        a_values, b_values = (a, b) if native else (triton_fp8.as_bytes(a), triton_fp8.as_bytes(b))
        args = {
            "a": Scaled(a_values, a.stride(0), call.a_scale, *a_scale_strides),
            "b": Scaled(b_values, b.stride(0), call.b_scale, *b_scale_strides),
            "c_ptr": call.c if config.split_k == 1 else call.parts,
            "M": m, "N": n, "K": k, "steps": ceil_div(ceil_div(k, GROUP), config.split_k),
        }  # fmt: skip
        grouped = len(call.a_scale.shape) == 2 and call.a_scale.shape[1] != 1
        constants = {
            "A_FORMAT": _FORMATS[a.dtype], "B_FORMAT": _FORMATS[b.dtype], "NATIVE": native,
            "B_ROWS_PER_SCALE": b_rows_per_scale, "GROUPED": grouped,
            "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "GROUP_M": config.group_m, "EVEN_K": k % GROUP == 0,
            "INT64": max(m * n, _extent(m, k, a, a_scale_strides), _extent(n, k, b, b_scale_strides)) >= 2**30,
        }  # fmt: skip
        grid = _tiles(call, config.block_m, config.block_n), config.split_k
        product = Launch(_fp8_gemm, grid, args, constants, config.options)
        if config.split_k == 1:
            return [product]
        adding = {"PARTS": config.split_k, "BLOCK": _ADDED}
        parts = {"part_ptr": call.parts, "c_ptr": call.c, "size": m * n}
        return [product, Launch(_add_parts, ceil_div(m * n, _ADDED), parts, adding, config.options)]


def _extent(rows: int, k: int, x: TensorSpec, scale_strides: list[int]) -> int:
    """Elements from the first to the last of a matrix or of its scales, at most."""
    row, column = scale_strides
    return max(rows * x.stride(0), rows * row + ceil_div(k, GROUP) * column)


def _stage(block_m: int, block_n: int) -> int:
    """Bytes of a tile of a and one of b; they are widened in registers, if at all."""
    return (block_m + block_n) * GROUP


def _tiles(call: Fp8MatmulCall, block_m: int, block_n: int) -> int:
    return ceil_div(call.m, block_m) * ceil_div(call.n, block_n)


fp8_gemm = Fp8Gemm()
