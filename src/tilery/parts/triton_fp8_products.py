"""Products of scaled fp8 matrices: a program per tile of c and part of K; parts are added up by a second launch.

Every 128 products of fp8 are added by the tensor cores, which keep few bits, then scaled and added in fp32. Without
tensor cores for fp8 (sm_80, the interpreter) values are widened to fp16 first: that is exact.
"""

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from tilery.base.spec import DTYPES, Artifact, TensorSpec, Work
from tilery.hardware import device
from tilery.hardware.device import ARCHS
from tilery.languages import triton_glue
from tilery.parts import triton_fp8
from tilery.parts.fp8 import GROUP, LARGEST, ceil_div
from tilery.parts.fp8_products import outputs, scale_steps, split_work, split_workspace
from tilery.parts.triton_fp8 import widen

archs = ARCHS

_K = tl.constexpr(GROUP)
_FORMATS = {DTYPES[format]: format for format in LARGEST}
_PROCESSORS = 132  # of an H200: fewer tiles than that are cut along K
_ADDED = 1024  # elements of c that a program of the second launch adds up


@dataclass(frozen=True)
class Config:
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    split_k: int = 1  # programs that share a tile of c, each with a part of K
    group_m: int = 8  # tiles of a column band that run together and share b in L2
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
_FEW_ROWS = 256  # up to here configs cut K too


def refusal(
    a: TensorSpec, a_scale: TensorSpec, b: TensorSpec, b_scale: TensorSpec, out_dtype: str, config: Config | None = None
) -> str | None:
    if config is None:
        return None
    sizes = config.block_m, config.block_n, config.split_k
    if any(size < 1 or size & (size - 1) for size in sizes) or min(sizes[:2]) < 16:
        return f"block_m and block_n must be powers of two from 16 on, split_k one from 1 on, got {config}"
    if config.block_k != GROUP:
        return f"block_k must be {GROUP}, as far as a scale goes, got {config.block_k}"
    if config.split_k > (most := max(a.shape[1] // GROUP, 1)):
        return f"split_k must be at most {most}, the blocks of {GROUP} in K, got {config.split_k}"
    limit = device.shared_limit(device.arch(a.device))
    need = config.num_stages * _stage(config.block_m, config.block_n)
    if need > limit:
        return f"{config} needs {need} bytes of shared memory, a block has {limit}"
    return None


def _stage(block_m: int, block_n: int) -> int:
    """Bytes of a tile of a and one of b; they are widened in registers, if at all."""
    return (block_m + block_n) * GROUP


def default(a: TensorSpec, a_scale: TensorSpec, b: TensorSpec, b_scale: TensorSpec, out_dtype: str) -> Config:
    (m, k), n = a.shape, b.shape[0]
    if m <= 16:
        block_m, block_n, warps = 16, 64, 4
    elif m <= 64:
        block_m, block_n, warps = 64, 64, 4
    else:
        block_m, block_n, warps = 128, 128, 8
    most = device.shared_limit(device.arch(a.device)) // _stage(block_m, block_n)
    tiles, split = ceil_div(m, block_m) * ceil_div(n, block_n), 1
    while 0 < tiles * split * 2 <= _PROCESSORS and k >= 8 * GROUP * split * 2:  # a part has eight blocks or more
        split *= 2
    return Config(block_m, block_n, warps, num_stages=min(4, most), split_k=split)


def configs(a: TensorSpec, a_scale: TensorSpec, b: TensorSpec, b_scale: TensorSpec, out_dtype: str) -> list[Config]:
    splits = (1, 2, 4, 8) if a.shape[0] <= _FEW_ROWS else (1,)
    found = [Config(*tile, stages, split) for split in splits for tile in _TILES for stages in (3, 4, 6)]
    return [c for c in found if refusal(a, a_scale, b, b_scale, out_dtype, c) is None]


def estimate(
    a: TensorSpec, a_scale: TensorSpec, b: TensorSpec, b_scale: TensorSpec, out_dtype: str, config: Config
) -> Work:
    return split_work(a, b, config.block_m, config.block_n, config.split_k)


def workspace(
    a: TensorSpec, a_scale: TensorSpec, b: TensorSpec, b_scale: TensorSpec, out_dtype: str, config: Config
) -> tuple[TensorSpec, ...]:
    return split_workspace(a, b, config.split_k)


@triton.jit
def _operand(tile, k, left, FORMAT: tl.constexpr, NATIVE: tl.constexpr, EVEN_K: tl.constexpr):
    """A tile as the tensor cores take it; of the places k along it so many are left."""
    x = tl.load(tile) if EVEN_K else tl.load(tile, mask=k < left, other=0.0)
    return x if NATIVE else widen(x, FORMAT, NATIVE).to(tl.float16)


@triton.jit
def _product(
    a_ptr, b_ptr, a_scale_ptr, b_scale_ptr, c_ptr,
    M, N, K, steps, a_row, b_row, a_scale_row, a_scale_column, b_scale_row, b_scale_column,
    A_FORMAT: tl.constexpr, B_FORMAT: tl.constexpr, NATIVE: tl.constexpr, B_HIGH: tl.constexpr, GROUPED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BAND: tl.constexpr, EVEN_K: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    band = BAND * tl.cdiv(N, BLOCK_N)
    top = tl.program_id(0) // band * BAND
    height = min(tl.cdiv(M, BLOCK_M) - top, BAND)
    n_first = tl.program_id(0) % band // height * BLOCK_N
    m = (top + tl.program_id(0) % band % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    n, k = n_first + tl.arange(0, BLOCK_N), tl.arange(0, _K)
    if FAR:  # row * stride overflows int32 past 2**31 elements
        m, n = m.to(tl.int64), n.to(tl.int64)
    # Past the edges the last row and column are read again: a load without a mask is the faster.
    m_read, n_read = tl.minimum(m, M - 1), tl.minimum(n, N - 1)
    first = tl.program_id(1) * steps
    a_tile = a_ptr + first * _K + (m_read[:, None] * a_row + k[None, :])
    b_tile = b_ptr + first * _K + (n_read[None, :] * b_row + k[:, None])
    a_scales, b_scales = a_scale_ptr + m_read * a_scale_row, b_scale_ptr + n_read // B_HIGH * b_scale_row
    b_one = b_scale_ptr + n_first // B_HIGH * b_scale_row

    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for block in range(first, min(first + steps, tl.cdiv(K, _K))):
        a = _operand(a_tile, k[None, :], K - block * _K, A_FORMAT, NATIVE, EVEN_K)
        b = _operand(b_tile, k[:, None], K - block * _K, B_FORMAT, NATIVE, EVEN_K)
        if not GROUPED:
            acc = tl.dot(a, b, acc, max_num_imprecise_acc=_K)
        elif BLOCK_N <= _K:  # one scale of b for the tile
            scale = tl.load(a_scales + block * a_scale_column) * tl.load(b_one + block * b_scale_column)
            acc += tl.dot(a, b) * scale[:, None]
        else:
            scale = tl.load(a_scales + block * a_scale_column)
            acc += tl.dot(a, b) * (scale[:, None] * tl.load(b_scales + block * b_scale_column)[None, :])
        a_tile += _K
        b_tile += _K
    if not GROUPED:
        acc *= tl.load(a_scales)[:, None] * tl.load(b_scales)[None, :]
    c_ptr += tl.program_id(1).to(tl.int64) * M * N
    tl.store(c_ptr + (m[:, None] * N + n[None, :]), acc, mask=(m[:, None] < M) & (n[None, :] < N))


@triton.jit
def _add(part_ptr, c_ptr, size, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """c = the parts, always in the same order: ten runs give the same bits."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(part_ptr + part * size + index, mask=index < size, other=0.0)
    tl.store(c_ptr + index, total, mask=index < size)


def _launches(outs, args, config: Config, parts: Any = None) -> list[tuple[Any, ...]]:
    """Kernel, grid, arguments and constants, in turn; of tensors for `run` and of specs for `compile`."""
    a, a_scale, b, b_scale, _ = args
    (m, k), n, native = a.shape, b.shape[0], triton_fp8.native(a.device)
    (_, *a_steps), (b_high, *b_steps) = scale_steps(a_scale, m), scale_steps(b_scale, n)
    values = (a, b) if native else (triton_fp8.as_bytes(a), triton_fp8.as_bytes(b))
    blocks = ceil_div(k, GROUP)
    shapes = m, n, k, ceil_div(blocks, config.split_k), a.stride(0), b.stride(0), *a_steps, *b_steps
    constants = {
        "A_FORMAT": _FORMATS[a.dtype], "B_FORMAT": _FORMATS[b.dtype], "NATIVE": native,
        "B_HIGH": b_high, "GROUPED": len(a_scale.shape) == 2 and a_scale.shape[1] != 1,
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BAND": config.group_m, "EVEN_K": k % GROUP == 0,
        "FAR": max(m * a.stride(0), n * b.stride(0), m * n) >= 2**30,
    }  # fmt: skip
    grid = ceil_div(m, config.block_m) * ceil_div(n, config.block_n), config.split_k
    target = outs[0] if parts is None else parts
    made: list[tuple[Any, ...]] = [(_product, grid, (*values, a_scale, b_scale, target, *shapes), constants)]
    if parts is not None:
        adding = {"PARTS": config.split_k, "BLOCK": _ADDED}
        made.append((_add, (ceil_div(m * n, _ADDED),), (parts, outs[0], m * n), adding))
    return made


def _planned(specs, config):
    return _launches(outputs(*specs), specs, config, *workspace(*specs, config=config))


def compile(specs, config: Config, arch: str) -> Artifact:
    made = _planned(specs, config)
    built = [triton_glue.legacy_compile(kernel, given, how, config.options, arch) for kernel, _, given, how in made]
    return triton_glue.greediest(built)


def run(outs, args, config: Config, parts=None) -> None:
    if not args[0].shape[1]:  # a sum of nothing is zero, whatever its scales are
        outs[0].zero_()
        return
    for kernel, grid, given, how in _launches(outs, args, config, parts):
        kernel[grid](*given, **how, **config.options)
