"""Split KV: a program takes a part of a sequence's keys for all queries and heads that share them; then it is combined.

Nothing here looks at the batch: a sequence must be cut alike in any.
"""

import torch

from tilery.base.spec import Artifact, TensorSpec, Work
from tilery.ops.attention_decode import outputs
from tilery.parts import triton_paged_attention as attention
from tilery.parts.attention_checks import cutting_window
from tilery.parts.fp8 import power
from tilery.parts.paged_attention import bound
from tilery.parts.triton_paged_attention import Config, Problem, archs, fitting

__all__ = ["Config", "archs", "compile", "configs", "default", "estimate", "refusal", "run", "workspace"]

_PROGRAMS = 32, 256  # of one sequence: at least and at most
_TILES = (  # keys, warps, stages
    *((32, 2, stages) for stages in (4, 5)),
    *((32, 4, stages) for stages in (4, 5)),
    *((64, 2, stages) for stages in (3, 4)),
    *((64, 4, stages) for stages in (3, 4, 5)),
    *((128, 4, stages) for stages in (2, 3)),
    *((128, 8, stages) for stages in (2, 3)),
)


def _problem(q, k_cache, v_cache, lengths, table, k_scale, v_scale, sinks, window, softcap, scale=None) -> Problem:
    tensors = q, k_cache, v_cache, None, lengths, table, k_scale, v_scale, sinks
    window = cutting_window(window, q.shape[1], bound(k_cache, table))
    return Problem(*tensors, q.shape[1], window, softcap, scale)


def refusal(*specs, config: Config | None = None) -> str | None:
    return attention.refusal(_problem(*specs), config)


def _rows(p: Problem) -> int:
    return min(max(power(p.rows), 16), 64)


def _splits(p: Problem) -> int:
    """Many splits read fast what is one sequence; but what each keeps of every row is written and read again."""
    least, most = _PROGRAMS
    programs = min(max(1024 // max(p.rows, 1), least), most)
    return power(max(programs // p.kv_heads, 1))


def default(*specs) -> Config:
    p = _problem(*specs)
    if p.q.dtype == torch.float32:
        return fitting(p, 16, 16, _splits(p), num_warps=4, num_stages=2)
    keys = 64 if p.size <= 128 and p.rows > 8 else 32
    if _rows(p) < 64:
        return fitting(p, _rows(p), keys, _splits(p), num_warps=4, num_stages=4 if keys == 32 else 3)
    return fitting(p, 64, keys, _splits(p), num_warps=4 if p.size <= 128 else 8, num_stages=3)


def configs(*specs) -> list[Config]:
    p = _problem(*specs)
    if p.q.dtype == torch.float32:
        tiles = (16, 4, 2), (16, 4, 3), (32, 8, 2)
        found = [Config(16, keys, _splits(p), *rest) for keys, *rest in tiles]
    else:
        splits = dict.fromkeys(max(int(_splits(p) * times), 1) for times in (1, 2, 0.5))
        rows = _rows(p)
        # Of the others scores and weights take more registers than a thread has; 64 rows are for wgmma, of 4 warps.
        most = 1024 if rows >= 64 else 512
        tiles = [tile for tile in _TILES if rows * tile[0] <= most * tile[1] and tile[1] >= rows // 16]
        found = [Config(rows, keys, s, *rest) for s in splits for keys, *rest in tiles]
    return [c for c in found if attention.refusal(p, c) is None]


def estimate(*specs, config: Config) -> Work:
    return attention.estimate(_problem(*specs), config)


def workspace(*specs, config: Config) -> tuple[TensorSpec, ...]:
    return attention.workspace(_problem(*specs), config)


def compile(specs, config: Config, arch: str) -> Artifact:
    return attention.compile(_problem(*specs), outputs(*specs), config, arch)


def run(outs, args, config: Config, *kept) -> None:
    *tensors, scale, window, softcap = args
    attention.run(_problem(*tensors, window, softcap, scale), outs, config, *kept)
