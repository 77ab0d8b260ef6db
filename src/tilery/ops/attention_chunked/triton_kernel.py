"""Tiles of a chunk's rows, those of all heads that share keys; where tiles are few, keys are cut among programs too."""

import torch

from tilery.base.spec import Artifact, TensorSpec, Work
from tilery.ops.attention_chunked import outputs, queries
from tilery.parts import triton_paged_attention as attention
from tilery.parts.attention_checks import cutting_window
from tilery.parts.fp8 import ceil_div, power
from tilery.parts.paged_attention import bound
from tilery.parts.triton_fp8 import native
from tilery.parts.triton_paged_attention import Config, Problem, archs, fitting

__all__ = ["Config", "archs", "compile", "configs", "default", "estimate", "refusal", "run", "workspace"]

_PROCESSORS = 132  # of an H200


def _problem(q, k_cache, v_cache, starts, *rest, scale=None) -> Problem:
    lengths, table, k_scale, v_scale, sinks, window, softcap, max_seqlen_q = rest
    tensors = q, k_cache, v_cache, starts, lengths, table, k_scale, v_scale, sinks
    most = queries(q, max_seqlen_q)
    return Problem(*tensors, most, cutting_window(window, most, bound(k_cache, table)), softcap, scale)


def refusal(*specs, config: Config | None = None) -> str | None:
    return attention.refusal(_problem(*specs), config)


def _rows(p: Problem, most: int) -> int:
    return min(max(power(p.rows), 16), most)


def _splits(p: Problem, block_m: int, block_n: int) -> int:
    """As many as fill the processors once, each with eight blocks of keys at least; of small tiles two fit one."""
    tiles = ceil_div(p.tokens * (p.heads // p.kv_heads), block_m) * p.kv_heads
    places = _PROCESSORS * (2 if block_m <= 64 else 1)
    fill, most = places // max(tiles, 1), p.span // (8 * block_n)
    return 2 ** (max(min(fill, most), 1).bit_length() - 1)


def _config(p: Problem, block_m: int, block_n: int, num_warps: int, num_stages: int, times: int = 1) -> Config:
    config = fitting(p, _rows(p, block_m), block_n, 1, num_warps, num_stages)
    splits = _splits(p, config.block_m, config.block_n) * times
    return Config(config.block_m, config.block_n, splits, config.num_warps, config.num_stages)


def default(*specs) -> Config:
    p = _problem(*specs)
    if p.q.dtype == torch.float32:
        return _config(p, 32, 32, num_warps=4, num_stages=2)
    if p.q.dtype != p.k_cache.dtype:  # fp8, which is widened in registers: by hand where the device does not know it
        return _config(p, 128, 64, num_warps=8, num_stages=4) if native(p.q.device) else _config(p, 64, 32, 4, 3)
    return _config(p, 64, 64, num_warps=4 if p.size <= 128 else 8, num_stages=3)


def configs(*specs) -> list[Config]:
    p = _problem(*specs)
    if p.q.dtype == torch.float32:
        return [_config(p, 32, keys, warps, 2) for keys in (16, 32) for warps in (4, 8)]
    tiles = ((64, 64, 4), (64, 128, 4), (64, 64, 8), (128, 64, 8), (128, 128, 8))
    found = [_config(p, *tile, stages, times) for times in (1, 2) for tile in tiles for stages in (2, 3, 4)]
    return [c for c in dict.fromkeys(found) if attention.refusal(p, c) is None]


def estimate(*specs, config: Config) -> Work:
    return attention.estimate(_problem(*specs), config)


def workspace(*specs, config: Config) -> tuple[TensorSpec, ...]:
    return attention.workspace(_problem(*specs), config)


def compile(specs, config: Config, arch: str) -> Artifact:
    return attention.compile(_problem(*specs), outputs(*specs), config, arch)


def run(outs, args, config: Config, *kept) -> None:
    *tensors, scale, window, softcap, max_seqlen_q = args
    attention.run(_problem(*tensors, window, softcap, max_seqlen_q, scale=scale), outs, config, *kept)
