"""Attention on Hopper by TMA and wgmma: which tiles, and how the kernel is built and launched.

ops/attention/hopper.cu is the device side. Warpgroups of 64 queries each walk over blocks of keys from the last to the
first; one more fetches. Heads whose size is no multiple of 64 lie in tiles that are, with zeros behind.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tilery.base.spec import Artifact, Work, dtype_name
from tilery.hardware import device
from tilery.languages import cuda_glue, tensor_maps
from tilery.parts.attention import Problem, pairs, problem, problem_of_run
from tilery.parts.fp8 import ceil_div
from tilery.parts.kernels import Functions, functions

archs = ("sm_90",)

_SOURCE = Path(__file__).parents[1] / "ops" / "attention" / "hopper.cu"
_L2 = 2**25  # bytes of keys and values that blocks running together may share: about half of an H200's
_FAR = 2**29  # tokens: more than a query sees
_PATTERN, _BARRIERS, _RESERVED = 1024, 16, 1024  # bytes to align tiles, for a slot, that the driver takes of a block
_TODO = 96  # bytes that say which tile is being done, and which is next
_MOST_STAGES = 8

# Queries and keys of a tile by the width of a head, what is likely best first. Larger ones do not fit the registers.
_TILES = {
    64: ((192, 112), (128, 128), (128, 192)),
    128: ((128, 128), (128, 176)),
    192: ((128, 112), (128, 96)),
    256: ((128, 80), (128, 64)),
}


@dataclass(frozen=True)
class Config:
    block_m: int  # queries, 64 for each warpgroup
    block_n: int  # keys
    stages: int  # blocks of keys or of values that are under way
    share: int = 1  # blocks of a cluster that fetch keys and values for each other
    persistent: bool = True  # blocks go from tile to tile, else each has one

    @property
    def threads(self) -> int:
        return self.block_m * 2 + 128

    def shared(self, width: int) -> int:
        """Bytes for heads that take so many columns."""
        slots = self.stages * (self.block_n * width * 2 + _BARRIERS)
        return _PATTERN + slots + self.block_m * width * 2 + _BARRIERS + _TODO


def columns(size: int) -> int:
    """Columns that a head takes in shared memory: 128 bytes at a time."""
    return ceil_div(size, 64) * 64


def _extras(p: Problem) -> list[str]:
    asked = {
        "key_mask": p.key_mask is not None, "bias": p.bias is not None, "slopes": p.slopes is not None,
        "sinks": p.sinks is not None, "softcap": p.softcap > 0,
    }  # fmt: skip
    return [name for name, there in asked.items() if there]


def _refusal(p: Problem, config: Config | None) -> str | None:
    if p.q.dtype not in (torch.float16, torch.bfloat16):
        return f"multiplies fp16 and bf16 alone, got {dtype_name(p.q.dtype)}"
    if extra := _extras(p):
        return f"takes no more than packed sequences, causal and window, got {', '.join(extra)}"
    if p.size != p.value:
        return f"heads of keys and values must be of one size, got {p.size} and {p.value}"
    if max(_tokens(p)) >= _FAR or _pairs(p) * ceil_div(p.queries, 64) >= _FAR:
        return f"numbers tokens and tiles up to {_FAR}, got {max(_tokens(p))} tokens in {_pairs(p)} heads"
    for name, x, sizes, strides in _operands(p):
        if all(sizes) and (why := tensor_maps.heads_refusal(name, x, sizes, strides)):
            return why
    return None if config is None else _config_refusal(p, config)


def _config_refusal(p: Problem, config: Config) -> str | None:
    width = columns(p.size)
    if (config.block_m, config.block_n) not in _TILES[width]:
        known = ", ".join(f"{m} × {n}" for m, n in _TILES[width])
        return f"tiles of heads of {p.size} must be {known}, got {config.block_m} × {config.block_n}"
    sharing = config.share == 2 and p.cu_q is None and config.block_m == 128  # more queries spill registers
    if config.share != 1 and not sharing:
        return f"share must be 1 or, of sequences that are not packed and tiles of 128 queries, 2, got {config.share}"
    most = fitting(config.block_m, config.block_n, width)
    if not 2 <= config.stages <= most:
        return f"stages must be 2 to {most} for shared memory to hold them, got {config.stages}"
    return None


def fitting(block_m: int, block_n: int, width: int, blocks: int = 1) -> int:
    """Stages that shared memory has room for, with so many blocks of threads on a processor."""
    room = device.shared_limit("sm_90") // blocks - _RESERVED - Config(block_m, block_n, 0).shared(width)
    return min(room // (block_n * width * 2 + _BARRIERS), _MOST_STAGES)


def _config(p: Problem, tile: tuple[int, int], share: int, persistent: bool) -> Config:
    return Config(*tile, fitting(*tile, columns(p.size)), share, persistent)


def _default(p: Problem) -> Config:
    """Packed sequences differ in length: their tiles go to whichever processor is free.

    Blocks that share keys read half as much of the L2, which has more to give; they are as fast at best.
    """
    tile = next(tile for tile in _TILES[columns(p.size)] if tile[0] == 128 or p.queries > 128)
    return _config(p, tile, 1, persistent=p.cu_q is None)


def _configs(p: Problem) -> list[Config]:
    forms = ((1, True), (1, False), (2, True))
    found = [_config(p, tile, *form) for tile in _TILES[columns(p.size)] for form in forms]
    return [c for c in dict.fromkeys((_default(p), *found)) if _refusal(p, c) is None]


def _estimate(p: Problem, config: Config) -> Work:
    """Of a tile in the middle of its sequence: causal ones see half of the keys, about."""
    there = pairs(p.queries, p.keys, p.causal, p.window)
    keys = min(p.keys, ceil_div(there, max(p.queries, 1)) + config.block_n)
    moved = (config.block_m + keys) * 2 * p.size * p.q.dtype.itemsize
    blocks = p.batch * p.heads * ceil_div(p.queries, config.block_m)
    return Work(blocks, 4 * config.block_m * keys * columns(p.size), moved)


# Launches


def _tokens(p: Problem) -> tuple[int, int]:
    """Queries and keys of a sequence, or of all packed ones."""
    return (p.q.shape[0], p.k.shape[0]) if p.cu_q is not None else (p.queries, p.keys)


def _pairs(p: Problem) -> int:
    """Of a sequence and a head; packed tokens that are left are a sequence too."""
    return (p.batch + (p.cu_q is not None)) * p.heads


def _operands(p: Problem) -> list[tuple[str, Any, tuple[int, ...], tuple[int, ...]]]:
    """q, k and v as [sequences, heads, tokens, values], innermost first, and the strides of all but the values."""
    queries, keys = _tokens(p)
    sequences = 1 if p.cu_q is not None else p.batch
    sides = (
        ("q", p.q, queries, p.heads, p.q_strides),
        ("k", p.k, keys, p.kv_heads, p.k_strides),
        ("v", p.v, keys, p.kv_heads, p.v_strides),
    )
    return [(name, x, (p.size, tokens, count, sequences), (s[1], s[2], s[0])) for name, x, tokens, count, s in sides]


@functools.cache
def _kernel(dtype: torch.dtype, size: int, config: Config) -> cuda_glue.Kernel:
    sizes = f"{size}, {config.block_n}, {config.block_m // 64}, {config.stages}, {config.share}"
    name = f"hopper_attention<{cuda_glue.TYPES[dtype]}, {sizes}>"
    shared = config.shared(columns(size))
    return cuda_glue.Kernel(_SOURCE, name, (None,) * 4, config.threads, shared, config.share, early=True)


def _run(p: Problem, config: Config) -> None:
    queries, keys = _tokens(p)
    if keys == 0 and p.cu_q is None:
        p.out.zero_()
        if p.lse is not None:
            p.lse.fill_(-torch.inf)
        return
    kernel, count = _kernel(p.q.dtype, p.size, config), _pairs(p)
    tiles = ceil_div(p.queries, config.block_m * config.share)
    boxes = config.block_m, config.block_n // config.share, config.block_n // config.share
    operands = _operands(p)
    if keys == 0:  # there is no map of nothing; packed sequences may be cut all the same
        operands = operands[:1] * 3
    maps = [tensor_maps.of_heads(x, sizes, steps, rows) for (_, x, sizes, steps), rows in zip(operands, boxes)]
    lse = (0, 0) if p.lse is None else (0, p.lse.stride(0)) if p.cu_q is not None else p.lse.stride()[:2]
    pointers = (0 if x is None else x.data_ptr() for x in (p.out, p.lse, p.cu_q, p.cu_k))
    group, shared = p.heads // p.kv_heads, p.keys * 2 * p.size * p.q.dtype.itemsize
    band = min(group * max(_L2 // max(shared, 1), 1), count)
    left = min(p.window, _FAR) - 1 if p.window else _FAR
    shapes = p.batch, p.heads, group, queries, keys, p.queries, p.keys, tiles, band, left, 0 if p.causal else left
    blocks = count * tiles * config.share
    if config.persistent:
        blocks = min(blocks, kernel.resident() // config.share * config.share)
    values = *pointers, *p.out_strides, *lse, *shapes, float(p.scale)
    kernel.launch(blocks, *maps, cuda_glue.params(_SOURCE, "hopper_attention", *values))


def _compile(p: Problem, config: Config, arch: str) -> Artifact:
    return _kernel(p.q.dtype, p.size, config).compile(arch)


def kernel(outputs: Callable[..., Any]) -> Functions:
    """The module of an op with these outputs."""
    mine = _refusal, _default, _configs, _estimate, _compile, _run
    return functions(lambda specs: problem(outputs(*specs), specs), problem_of_run, *mine)
