"""Matrix products in Triton: a program per tile of c, whose epilogue works on the sums while they are in registers.

Tiles of a and b stream through shared memory, and the compiler pipelines the loads. `kernel` makes an op's module.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from tilery.base.spec import Artifact, TensorSpec, Work
from tilery.hardware import device
from tilery.hardware.device import ARCHS
from tilery.languages import triton_glue
from tilery.parts.kernels import Functions, functions
from tilery.parts.products import Product
from tilery.parts.tiles import tiled_product
from tilery.parts.triton_gated import share

archs = ARCHS


@dataclass(frozen=True)
class Config:
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8  # tiles of a column band that run together and share b in L2


def _refusal(p: Product, config: Config | None) -> str | None:
    if config is None:
        return None
    limit = device.shared_limit(device.arch(p.a.device))
    need = config.num_stages * (config.block_m + p.halves * config.block_n) * config.block_k * p.a.dtype.itemsize
    if need > limit:
        return f"{config} needs {need} bytes of shared memory, a block has {limit}"
    return None


def _default(p: Product) -> Config:
    """Of two halves, each takes half of the tile's columns."""
    wide = 64 // p.halves
    if p.a.dtype == torch.float32:
        if p.precision == "tf32" and p.m > 64:
            return Config(128, 2 * wide, 32, num_warps=8, num_stages=3)
        return Config(64, wide, 32, num_warps=8, num_stages=2)
    if p.m > 32 and not _even(p):
        return Config(128, 2 * wide, 32, num_warps=8, num_stages=2) if p.m > 128 else Config(64, wide, 32, 4, 2)
    if p.m <= 32:  # few rows: narrow tiles, so that there are enough of them
        return Config(16 if p.m <= 16 else 32, wide, 128, num_warps=4, num_stages=4)
    if p.m <= 128:
        return Config(64, wide, 128, num_warps=4, num_stages=3)
    return Config(128, 2 * wide, 64, num_warps=8, num_stages=3)  # 4096³ on an H200: 201 µs, 128 × 256 takes 263


def _even(p: Product) -> bool:
    """Whether Triton can tell that 16 bytes may be loaded at a time; where not, deep tiles spill registers."""
    along = p.m if p.a_row == 1 else p.k, p.n if p.b_column == 1 else p.k  # what lies side by side, and so its mask
    sizes = *along, p.a_row, p.a_column, p.b_row, p.b_column
    return p.a.aligned and p.b.aligned and all(size == 1 or size % 16 == 0 for size in sizes)


def _configs(p: Product) -> list[Config]:
    tiles = (
        (16, 64, 128, 4),
        (32, 64, 128, 4),
        (64, 64, 128, 4),
        (64, 128, 64, 4),
        (128, 128, 64, 8),
        (128, 256, 64, 8),
    )
    found = [Config(m, n // p.halves, k, warps, stages) for m, n, k, warps in tiles for stages in (2, 3, 4)]
    return [c for c in found if _refusal(p, c) is None]


def _estimate(p: Product, config: Config) -> Work:
    """The addend counts as much as c: what a tile of it costs is next to nothing."""
    kind, where = p.a.dtype, p.a.device
    a, b = TensorSpec.contiguous((p.m, p.k), kind, where), TensorSpec.contiguous((p.k, p.halves * p.n), kind, where)
    return tiled_product(a, b, config.block_m, p.halves * config.block_n)


@triton.jit
def _activated(y, ACT: tl.constexpr):
    if ACT == "relu":
        return tl.where(y < 0, 0.0, y)  # written so that NaN stays
    if ACT == "silu":
        return y * share(y, "silu")
    if ACT == "gelu":
        return y * share(y, "none")
    if ACT == "gelu_tanh":
        return y * share(y, "tanh")
    return y


@triton.jit
def _product(
    a_ptr, b_ptr, c_ptr, bias_ptr, addend_ptr,
    M, N, K, a_row, a_column, b_row, b_column, addend_row, addend_column, alpha, beta,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    EVEN_K: tl.constexpr, FAR: tl.constexpr, ACT: tl.constexpr, PRECISION: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    band = GROUP * tl.cdiv(N, BLOCK_N)
    first = tl.program_id(0) // band * GROUP
    height = min(tl.cdiv(M, BLOCK_M) - first, GROUP)
    m = (first + tl.program_id(0) % band % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) % band // height * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)

    step = tl.full((), BLOCK_K, tl.int64 if FAR else tl.int32)
    if FAR:  # row * stride overflows int32 past 2**31 elements
        m, n, k = m.to(tl.int64), n.to(tl.int64), k.to(tl.int64)
    a_tile = a_ptr + (m[:, None] * a_row + k[None, :] * a_column)
    b_tile = b_ptr + (k[:, None] * b_row + n[None, :] * b_column)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if HALVES == 2:
        up_tile = b_tile + tl.full((), 1, tl.int64) * N * b_column
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        a_mask, b_mask = m[:, None] < M, n[None, :] < N
        if not EVEN_K:
            a_mask, b_mask = a_mask & (k[None, :] < K - start), b_mask & (k[:, None] < K - start)
        a = tl.load(a_tile, mask=a_mask, other=0.0)
        b = tl.load(b_tile, mask=b_mask, other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)  # fp32 stays fp32 unless asked: tf32 would lose 13 bits
        if HALVES == 2:
            up = tl.dot(a, tl.load(up_tile, mask=b_mask, other=0.0), up, input_precision=PRECISION)
            up_tile += step * b_row
        a_tile += step * a_column
        b_tile += step * b_row

    mask = (m[:, None] < M) & (n[None, :] < N)
    if alpha is not None:
        acc *= alpha
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    acc = _activated(acc, ACT)
    if HALVES == 2:
        acc *= up
    if addend_ptr is not None:
        places = addend_ptr + (m[:, None] * addend_row + n[None, :] * addend_column)
        if beta is not None:
            acc += beta * tl.load(places, mask=mask & (beta != 0), other=0.0).to(tl.float32)
        else:
            acc += tl.load(places, mask=mask, other=0.0).to(tl.float32)
    c_tile = c_ptr + (m[:, None] * N + n[None, :])
    tl.store(c_tile, acc, mask=mask)


def _arguments(p: Product, config: Config) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The launch arguments, of tensors for a launch and of specs for a compile."""
    tensors = p.a, p.b, p.c, p.bias, p.addend
    # Elements from the first to the last; a tile may reach past the last, by less than as far again.
    reach = max(
        p.m * p.a_row + p.k * p.a_column, p.k * p.b_row + p.halves * p.n * p.b_column,
        p.m * p.addend_row + p.n * p.addend_column, p.m * p.n,
    )  # fmt: skip
    constants = {
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "GROUP": config.group_m,
        "EVEN_K": p.k % config.block_k == 0, "FAR": reach >= 2**30,
        "ACT": p.act, "PRECISION": p.precision, "HALVES": p.halves,
    }  # fmt: skip
    strides = p.a_row, p.a_column, p.b_row, p.b_column, p.addend_row, p.addend_column
    return (*tensors, p.m, p.n, p.k, *strides, p.alpha, p.beta), constants


def _compile(p: Product, config: Config, arch: str) -> Artifact:
    arguments, constants = _arguments(p, config)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return triton_glue.legacy_compile(_product, arguments, constants, options, arch)


def _run(p: Product, config: Config) -> None:
    arguments, constants = _arguments(p, config)
    grid = (triton.cdiv(p.m, config.block_m) * triton.cdiv(p.n, config.block_n),)
    _product[grid](*arguments, **constants, num_warps=config.num_warps, num_stages=config.num_stages)


def kernel(product: Callable[..., Product], outputs: Callable[..., Any]) -> Functions:
    """An op's module; `product(outs, *args)` is what it multiplies."""
    mine = _refusal, _default, _configs, _estimate, _compile, _run
    return functions(lambda specs: product(outputs(*specs), *specs), lambda outs, args: product(outs, *args), *mine)
