"""TMA and wgmma for sm_90: two blocks a processor go from split to split, and their rings do not run empty in between.

Nothing here looks at the batch or at the most keys of a sequence: it must be cut alike in any.
"""

from dataclasses import replace
from typing import Any

from tilery.base.spec import TensorSpec
from tilery.ops.attention_decode import outputs
from tilery.parts import hopper_paged_attention as paged
from tilery.parts.fp8 import power
from tilery.parts.hopper_attention import archs, columns
from tilery.parts.hopper_paged_attention import KEYS, MOST_SPLITS, Config, Problem, stages
from tilery.parts.kernels import functions

__all__ = ["Config", "archs", "compile", "configs", "default", "estimate", "refusal", "run", "workspace"]

_TILES = 32, 128  # of one sequence, at least and at most: an H200 has 132 processors
_LEAST = 128  # keys of a split: with fewer, what it keeps of them costs more than what is gained


def _of(specs: tuple[Any, ...]) -> Problem:
    """Of all arguments but the scale."""
    q, k, v, lengths, table, k_scale, _, sinks, window, softcap = specs
    tensors, extras = (q, k, v, None, lengths, table), paged.asked(k_scale, sinks, softcap)
    return paged.problem(tensors, outputs(*specs)[0], q.shape[1], window, None, *extras)


def _of_run(outs: Any, args: tuple[Any, ...]) -> Problem:
    q, k, v, lengths, table = args[:5]
    return paged.problem((q, k, v, None, lengths, table), outs[0], q.shape[1], args[9], args[8])


def _splits(p: Problem) -> int:
    """Many splits read fast what is one sequence; but what each keeps of every row is written and read again."""
    least, most = _TILES
    tiles = min(max(1024 // max(p.rows, 1), least), most)
    return min(power(max(tiles // p.kv_heads, 1)), MOST_SPLITS)


def _config(p: Problem, block_m: int, block_n: int) -> Config:
    room, least = stages(block_m, block_n, columns(p.size)), max(_LEAST // block_n, 1)
    return Config(block_n, room, _splits(p), block_m=block_m, least=least)


def _default(p: Problem) -> Config:
    """Tiles of 128 rows where there are more than 64, or keys would be read twice."""
    block_m = 64 if p.rows <= 64 and KEYS[64][columns(p.size)] else 128
    return _config(p, block_m, KEYS[block_m][columns(p.size)][0])


def _configs(p: Problem) -> list[Config]:
    shapes = [(m, n) for m in ((64, 128) if p.rows <= 64 else (128,)) for n in KEYS[m][columns(p.size)]]
    found = [_default(p)]
    for config in (_config(p, *shape) for shape in shapes):
        found += [replace(config, splits=config.splits * 2), replace(config, splits=max(config.splits // 2, 1))]
        found += [config, replace(config, least=config.least * 2), replace(config, persistent=False)]
    return [c for c in dict.fromkeys(found) if paged.refusal(p, c) is None]


refusal, default, configs, estimate, compile, run = functions(
    _of, _of_run, paged.refusal, _default, _configs, paged.estimate, paged.compile, paged.run
)


def workspace(*specs: Any, config: Config) -> tuple[TensorSpec, ...]:
    return paged.workspace(_of(specs), config)
