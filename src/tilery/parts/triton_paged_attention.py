"""Queries against a KV cache in Triton: a program takes rows of one kv head and a part of the keys.

Rows are the query tokens of a sequence times the heads that share keys. parts/triton_paged_kernel.py is the kernel,
parts/triton_paged.py cuts and combines.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tilery.base.spec import Artifact, TensorSpec, Work
from tilery.hardware import device
from tilery.hardware.device import ARCHS
from tilery.languages import triton_glue
from tilery.parts import kv_cache, triton_paged
from tilery.parts.fp8 import ceil_div, power
from tilery.parts.paged_attention import most_splits
from tilery.parts.triton_fp8 import as_bytes, native
from tilery.parts.triton_paged_kernel import attend

archs = ARCHS
_LEAST = 128
_MOST_SEQUENCES = 65535  # along a grid's third axis


@dataclass(frozen=True)
class Config:
    block_m: int  # rows: query tokens times the heads that share keys
    block_n: int  # keys
    splits: int  # programs that share the keys of a row, at most
    num_warps: int
    num_stages: int

    @property
    def least(self) -> int:
        """Keys of a split: with fewer, what it keeps of them costs more than what is gained."""
        return max(self.block_n, _LEAST)

    def options(self) -> dict[str, int]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


class Problem(NamedTuple):
    """Of an op's arguments, tensors or specs. starts None: q [B, Q, H, D]; else packed q [T, H, D]."""

    q: Any
    k_cache: Any
    v_cache: Any
    starts: Any
    lengths: Any
    table: Any
    k_scale: Any
    v_scale: Any
    sinks: Any
    queries: int  # of a sequence, at most
    window: int
    softcap: float
    scale: float | None = None

    @property
    def heads(self) -> int:
        return self.q.shape[-2]

    @property
    def size(self) -> int:
        return int(self.q.shape[-1])

    @property
    def tokens(self) -> int:
        return int(self.q.shape[0]) * (1 if self.starts is not None else self.queries)

    @property
    def kv_heads(self) -> int:
        return int(self.k_cache.shape[2])

    @property
    def rows(self) -> int:
        """Of a sequence and a kv head, at most."""
        return self.queries * (self.heads // self.kv_heads)

    @property
    def bound(self) -> int:
        """Keys of a sequence, at most."""
        return int(self.k_cache.shape[1]) * (1 if self.table is None else int(self.table.shape[1]))

    @property
    def span(self) -> int:
        """Keys that the queries of a sequence see, at most."""
        return min(self.bound, self.queries + self.window - 1) if self.window else self.bound


def width(size: int) -> int:
    return max(power(size), 16)


def shared(p: Problem, config: Config) -> int:
    """Bytes that q and the tiles in flight take; without wgmma a tile is in registers when the next takes its place."""
    held = max(config.num_stages - (0 if config.block_m >= 64 else 1), 1)
    tiles = held * 2 * config.block_n * int(p.k_cache.dtype.itemsize)
    return width(p.size) * (tiles + config.block_m * int(p.q.dtype.itemsize))


def refusal(p: Problem, config: Config | None) -> str | None:
    most = _MOST_SEQUENCES - (p.starts is not None)  # tokens that are left are a sequence too
    if (sequences := int(p.lengths.shape[0])) > most:
        return f"takes up to {most} sequences, got {sequences}"
    if config is None:
        return None
    sizes = config.block_m, config.block_n, config.splits
    if any(size < least or size & (size - 1) for size, least in zip(sizes, (16, 16, 1))):
        return f"blocks must be powers of two from 16 on and splits one from 1 on, got {config}"
    most = device.shared_limit(device.arch(p.q.device))
    if (need := shared(p, config)) > most:
        return f"{config} needs {need} bytes of shared memory, a block has {most}"
    return None


def fitting(p: Problem, block_m: int, block_n: int, splits: int, num_warps: int, num_stages: int) -> Config:
    """With fewer stages or keys where shared memory is short; with less than three a load is waited for at once."""
    scratch = 3 * 1024 if block_m >= 64 else 8 * 1024
    most = device.shared_limit(device.arch(p.q.device)) - scratch
    while shared(p, config := Config(block_m, block_n, splits, num_warps, num_stages)) > most and block_n > 16:
        if num_stages > 3 or (num_stages == 3 and block_n <= 32):
            num_stages -= 1
        else:
            block_n //= 2
    return config


# The launches


def workspace(p: Problem, config: Config) -> tuple[TensorSpec, ...]:
    keys = p.span + (config.block_n if p.window else 0)  # a window begins anywhere in a block
    splits = most_splits(config.splits, keys, config.least)
    return triton_paged.workspace(splits, p.tokens, p.heads, p.size, p.q.device)


def estimate(p: Problem, config: Config) -> Work:
    """Few programs that share a row's keys are the same as many: what counts is what one of them reads."""
    splits = most_splits(config.splits, p.span, config.least)
    tiles, keys = ceil_div(p.rows, config.block_m), ceil_div(p.span, splits)
    nbytes = 2 * keys * p.size * int(p.k_cache.dtype.itemsize) + min(p.rows, config.block_m) * p.size * 4
    programs = int(p.lengths.shape[0]) * p.kv_heads * tiles * splits
    return Work(programs, 4 * config.block_m * keys * width(p.size), nbytes)


def _strides(p: Problem) -> tuple[int, ...]:
    """Of q by sequence, token and head; of the caches by block, token and head; of the table by row."""
    q = (p.q.stride(0), p.q.stride(1), p.q.stride(2)) if p.starts is None else (0, p.q.stride(0), p.q.stride(1))
    cache = tuple(p.k_cache.stride(d) for d in range(3))
    return *q, *cache, p.table.stride(0) if p.table is not None else 0


def _launches(outs, p: Problem, config: Config, parts: Any = None, stats: Any = None) -> list[tuple[Any, ...]]:
    """Kernel, grid, arguments, constants and options, in turn; of tensors for `run` and of specs for `compile`."""
    format, sequences = kv_cache.FORMATS.get(p.k_cache.dtype), int(p.lengths.shape[0])
    splits = parts.shape[0] if parts is not None else 1
    tiles, strides = ceil_div(p.rows, config.block_m), _strides(p)
    caches = (as_bytes(p.k_cache), as_bytes(p.v_cache)) if format else (p.k_cache, p.v_cache)
    scale = p.size**-0.5 if p.scale is None else float(p.scale)
    arguments = (
        p.q, *caches, p.table, p.lengths, p.starts, p.k_scale, p.v_scale, p.sinks, outs[0], parts, stats,
        sequences, p.queries, p.tokens, splits, int(p.k_cache.shape[0]), p.bound, p.window, scale, float(p.softcap),
        *strides,
    )  # fmt: skip
    per_head = [scale is not None and scale.shape[0] > 1 for scale in (p.k_scale, p.v_scale)]
    constants = {
        "KV_HEADS": p.kv_heads, "GROUP": p.heads // p.kv_heads, "D": p.size,
        "PAGE": 0 if p.table is None else int(p.k_cache.shape[1]),
        "K_PER_HEAD": per_head[0], "V_PER_HEAD": per_head[1],
        "FORMAT": format, "NATIVE": format is not None and native(p.q.device),
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_D": width(p.size),
        "SPLITS": config.splits if splits > 1 else 1, "LEAST": config.least,
        "PLAIN": config.block_m >= 64 and p.k_cache.shape[0] > 0, "WINDOW": p.window > 0, "SOFTCAP": p.softcap > 0,
        "FAR": p.k_cache.stride(1) * config.block_n >= 2**30,
    }  # fmt: skip
    options = config.options()
    left = p.starts is not None and splits == 1  # else what combines the splits writes tokens that are left
    grid = tiles * p.kv_heads, splits, sequences + left
    made: list[tuple[Any, ...]] = [(attend, grid, arguments, constants, options)]
    if parts is not None:
        how = p.queries, p.bound, p.window, config.splits, config.block_n, config.least
        made.append(triton_paged.combination(parts, stats, p.lengths, p.starts, p.sinks, outs[0], None, *how))
    return made


def compile(p: Problem, outs: tuple[TensorSpec, ...], config: Config, arch: str) -> Artifact:
    made = _launches(outs, p, config, *workspace(p, config))
    return triton_glue.greediest(
        [triton_glue.legacy_compile(k, given, how, options, arch) for k, _, given, how, options in made]
    )


def run(p: Problem, outs: tuple[torch.Tensor, ...], config: Config, *kept: torch.Tensor) -> None:
    for kernel, grid, given, how, options in _launches(outs, p, config, *kept):
        triton_glue.legacy_launch(kernel, grid, given, how, options)
