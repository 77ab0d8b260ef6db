"""A program per tile of c: tiles of a and b stream through shared memory, and the compiler pipelines the loads."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tilery import device
from tilery.backends import triton_glue
from tilery.device import ARCHS
from tilery.ops.matmul import outputs
from tilery.parts.tiles import tiled_product
from tilery.spec import Artifact, TensorSpec, Work

archs = ARCHS


@dataclass(frozen=True)
class Config:
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8  # tiles of a column band that run together and share b in L2


def refusal(a: TensorSpec, b: TensorSpec, config: Config | None = None) -> str | None:
    if config is None:
        return None
    limit = device.shared_limit(device.arch(a.device))
    need = config.num_stages * (config.block_m + config.block_n) * config.block_k * a.dtype.itemsize
    if need > limit:
        return f"{config} needs {need} bytes of shared memory, a block has {limit}"
    return None


def default(a: TensorSpec, b: TensorSpec) -> Config:
    if a.dtype == torch.float32:
        return Config(64, 64, 32, num_warps=8, num_stages=2)
    if a.shape[0] <= 32:  # few rows: narrow tiles, so that there are enough of them
        return Config(16 if a.shape[0] <= 16 else 32, 64, 128, num_warps=4, num_stages=4)
    if a.shape[0] <= 128:
        return Config(64, 64, 128, num_warps=4, num_stages=3)
    return Config(128, 128, 64, num_warps=8, num_stages=3)  # 4096³ on an H200: 201 µs, 128 × 256 takes 263


def configs(a: TensorSpec, b: TensorSpec) -> list[Config]:
    tiles = (
        (16, 64, 128, 4),
        (32, 64, 128, 4),
        (64, 64, 128, 4),
        (64, 128, 64, 4),
        (128, 128, 64, 8),
        (128, 256, 64, 8),
    )
    found = [Config(*tile, stages) for tile in tiles for stages in (2, 3, 4)]
    return [c for c in found if refusal(a, b, c) is None]


def estimate(a: TensorSpec, b: TensorSpec, config: Config) -> Work:
    return tiled_product(a, b, config.block_m, config.block_n)


@triton.jit
def _matmul(
    a_ptr, b_ptr, c_ptr, M, N, K, a_row, a_column, b_row, b_column,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    EVEN_K: tl.constexpr, FAR: tl.constexpr,
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
    for start in range(0, K, BLOCK_K):
        a_mask, b_mask = m[:, None] < M, n[None, :] < N
        if not EVEN_K:
            a_mask, b_mask = a_mask & (k[None, :] < K - start), b_mask & (k[:, None] < K - start)
        a = tl.load(a_tile, mask=a_mask, other=0.0)
        b = tl.load(b_tile, mask=b_mask, other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")  # fp32 stays fp32: tf32 would lose 13 bits
        a_tile += step * a_column
        b_tile += step * b_row
    c_tile = c_ptr + (m[:, None] * N + n[None, :])
    tl.store(c_tile, acc, mask=(m[:, None] < M) & (n[None, :] < N))


def _reach(x) -> int:
    """Elements from the first to the last; a tile may reach past the last, by less than as far again."""
    return x.shape[0] * x.stride(0) + x.shape[1] * x.stride(1)


def _arguments(outs, a, b, config: Config):
    """The launch arguments, of tensors for `run` and of specs for `compile`."""
    shapes = (a.shape[0], b.shape[1], a.shape[1], a.stride(0), a.stride(1), b.stride(0), b.stride(1))
    constants = {
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "GROUP": config.group_m,
        "EVEN_K": a.shape[1] % config.block_k == 0, "FAR": max(map(_reach, (a, b, outs[0]))) >= 2**30,
    }  # fmt: skip
    return (a, b, outs[0], *shapes), constants


def compile(specs, config: Config, arch: str) -> Artifact:
    arguments, constants = _arguments(outputs(*specs), *specs, config)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return triton_glue.compile(_matmul, arguments, constants, options, arch)


def run(outs, args, config: Config) -> None:
    a, b = args
    arguments, constants = _arguments(outs, a, b, config)
    grid = (triton.cdiv(a.shape[0], config.block_m) * triton.cdiv(b.shape[1], config.block_n),)
    _matmul[grid](*arguments, **constants, num_warps=config.num_warps, num_stages=config.num_stages)
