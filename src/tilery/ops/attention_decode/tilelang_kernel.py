"""Split KV: a block takes a part of a sequence's keys for queries and heads that share them; a second launch combines.

A warp has 16 rows of its own, and tiles of keys and values pass by in a ring. Nothing here looks at the batch: a
sequence must be cut alike in any.
"""

from dataclasses import dataclass

import torch

from tilery.base.spec import Artifact, TensorSpec, Work, dtype_name
from tilery.hardware import device
from tilery.languages import tilelang_glue
from tilery.parts import no_keys
from tilery.parts.fp8 import ceil_div
from tilery.parts.paged_attention import bound
from tilery.parts.tilelang_attention import Problem, decode

archs = ("sm_90",)

_PROGRAMS = 128  # of one sequence: about one for each processor of an H200
_MOST_SEQUENCES = 65535  # along a grid's third axis
_FAR = 2**30  # keys: they are numbered in int32, as are those of the tiles behind the last
_ROWS, _KEYS = (16, 32, 64, 128), (16, 32, 64, 128)


@dataclass(frozen=True)
class Config:
    block_m: int  # rows: query tokens times the heads that share keys
    block_n: int  # keys
    splits: int  # blocks that share the keys of a row, at most
    stages: int  # tiles of keys and of values that have a place in shared memory

    @property
    def threads(self) -> int:
        return 2 * self.block_m


def _rows(q, k_cache) -> int:
    """Of a sequence and a kv head."""
    return q.shape[1] * (q.shape[2] // k_cache.shape[2])


def refusal(*specs, config: Config | None = None) -> str | None:
    q, k_cache, _, _, table, _, _, sinks, window, softcap = specs
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"T.gemm takes fp16 and bf16, and would round {dtype_name(q.dtype)} to tf32"
    if k_cache.dtype != q.dtype:
        return f"takes a cache of q's dtype, {dtype_name(q.dtype)}, got {dtype_name(k_cache.dtype)}"
    if window or softcap or sinks is not None:
        given = f"window={window}, softcap={softcap}, sinks={'none' if sinks is None else 'given'}"
        return f"takes neither a window nor a softcap nor sinks, got {given}"
    if bound(k_cache, table) >= _FAR:
        return f"numbers keys up to {_FAR}, got {bound(k_cache, table)}"
    if q.shape[0] > _MOST_SEQUENCES:
        return f"takes up to {_MOST_SEQUENCES} sequences, got {q.shape[0]}"
    return _config_refusal(q, config) if config else None


def _config_refusal(q, config: Config) -> str | None:
    if config.block_m not in _ROWS or config.block_n not in _KEYS:
        return f"block_m and block_n must be powers of two from 16 to 128, got {config}"
    if not 2 <= config.stages <= 8 or not 1 <= config.splits <= _MOST_SEQUENCES:
        return f"stages must be 2 to 8 and splits 1 to {_MOST_SEQUENCES}, got {config}"
    limit, need = device.shared_limit(device.arch(q.device)), _shared(q, config)
    return f"{config} needs {need} bytes of shared memory, a block has {limit}" if need > limit else None


def _shared(q, config: Config) -> int:
    """q, and rings of keys and values; the first starts on 1024 bytes."""
    return 2 * q.shape[3] * (config.block_m + 2 * config.stages * config.block_n) + 1024


def _splits(q, k_cache) -> int:
    return 1 << max(_PROGRAMS // k_cache.shape[2], 1).bit_length() - 1


def default(*specs) -> Config:
    """64 rows even for few: on sm_90 wgmma multiplies them, and its time is less than that of the keys' way."""
    q, k_cache = specs[:2]
    limit, keys, stages = device.shared_limit(device.arch(q.device)), 64, 3
    while _shared(q, config := Config(64, keys, _splits(q, k_cache), stages)) > limit:
        stages, keys = (stages - 1, keys) if stages > 2 else (stages, keys // 2)
    return config


def configs(*specs) -> list[Config]:
    q, k_cache = specs[:2]
    few = next((rows for rows in _ROWS if _rows(q, k_cache) <= rows), _ROWS[-1])
    splits = dict.fromkeys(max(int(_splits(q, k_cache) * times), 1) for times in (1, 2, 0.5))
    tiles = (32, 2), (32, 4), (64, 2), (64, 3), (64, 4), (128, 2)
    found = [Config(rows, keys, s, stages) for s in splits for rows in sorted({few, 64}) for keys, stages in tiles]
    return [c for c in found if refusal(*specs, config=c) is None]


def estimate(*specs, config: Config) -> Work:
    """Few blocks that share a row's keys are the same as many: what counts is what one of them reads."""
    q, k_cache, _, _, table = specs[:5]
    splits, rows = _live(k_cache, table, config), _rows(q, k_cache)
    keys = ceil_div(bound(k_cache, table), splits)
    nbytes = 4 * keys * q.shape[3] + 4 * min(rows, config.block_m) * q.shape[3]
    blocks = q.shape[0] * k_cache.shape[2] * ceil_div(rows, config.block_m) * splits
    return Work(blocks, 4 * config.block_m * keys * q.shape[3], nbytes)


def _live(k_cache, table, config: Config) -> int:
    """So many of the splits can have a key."""
    return max(min(config.splits, ceil_div(bound(k_cache, table), config.block_n)), 1)


def workspace(*specs, config: Config) -> tuple[TensorSpec, ...]:
    q, k_cache, _, _, table = specs[:5]
    splits = _live(k_cache, table, config)
    parts = TensorSpec.contiguous((splits, *q.shape), torch.float32, q.device)
    return parts, TensorSpec.contiguous((2, splits, *q.shape[:3]), torch.float32, q.device)


def _problem(q, k_cache, table, aligned: bool) -> Problem:
    even = aligned and not any(x.stride(d) % 8 for x in (q, k_cache) for d in range(3))
    page = k_cache.shape[1] if table is not None else 0
    (_, queries, heads, size), kv_heads = q.shape, k_cache.shape[2]
    return Problem(queries, heads, kv_heads, size, page, tilelang_glue.NAMES[q.dtype], even)


def compile(specs, config: Config, arch: str) -> Artifact:
    q, k_cache, v_cache, _, table = specs[:5]
    problem = _problem(q, k_cache, table, q.aligned and k_cache.aligned and v_cache.aligned)
    return tilelang_glue.legacy_compile(decode, (problem, config), arch)


def run(outs, args, config: Config, *kept) -> None:
    q, k_cache, v_cache, lengths, table, _, _, _, scale, _, _ = args
    if not bound(k_cache, table) or not k_cache.shape[0]:  # there is no key
        no_keys.fill(outs[0], None, lengths, bound(k_cache, table))
        return
    aligned = (q.data_ptr() | k_cache.data_ptr() | v_cache.data_ptr()) % 16 == 0
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    tensors = q, k_cache, v_cache, lengths, *([] if table is None else [table]), *kept, outs[0]
    tilelang_glue.legacy_launch(decode, (_problem(q, k_cache, table, aligned), config), (*tensors, scale))
