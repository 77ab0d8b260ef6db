"""TMA and wgmma for sm_90: tiles of 128 rows, pages fetched by their number; where tiles are few, keys are cut too."""

from typing import Any

from tilery.base.spec import TensorSpec
from tilery.ops.attention_chunked import outputs, queries
from tilery.parts import hopper_paged_attention as paged
from tilery.parts.fp8 import ceil_div
from tilery.parts.hopper_attention import archs, columns
from tilery.parts.hopper_paged_attention import KEYS, MOST_SPLITS, Config, Problem, stages
from tilery.parts.kernels import functions

__all__ = ["Config", "archs", "compile", "configs", "default", "estimate", "refusal", "run", "workspace"]

_ROWS = 128  # of a tile: query tokens times the heads that share keys
_PROCESSORS = 132  # of an H200
_LEAST = 8  # blocks of keys, for a split to be worth its sums


def _of(specs: tuple[Any, ...]) -> Problem:
    """Of all arguments but the scale."""
    *tensors, k_scale, _, sinks, window, softcap, most = specs
    extras = paged.asked(k_scale, sinks, softcap)
    return paged.problem(tuple(tensors), outputs(*specs)[0], queries(specs[0], most), window, None, *extras)


def _of_run(outs: Any, args: tuple[Any, ...]) -> Problem:
    return paged.problem(args[:6], outs[0], queries(args[0], args[12]), args[10], args[9])


def _config(p: Problem, block_n: int, share: int = 1, persistent: bool = True) -> Config:
    """With as many splits as fill the processors once, were all tokens of one sequence."""
    tiles = ceil_div(p.tokens * p.group, _ROWS * share) * share * p.kv_heads
    splits = min(_PROCESSORS // max(tiles, 1), p.keys // (_LEAST * block_n), MOST_SPLITS)
    return Config(block_n, stages(_ROWS, block_n, columns(p.size)), max(splits, 1), share, persistent)


def _default(p: Problem) -> Config:
    """Blocks that go on pass over the tiles that short chunks do not have: to start one for each would take longer."""
    return _config(p, KEYS[_ROWS][columns(p.size)][0])


def _configs(p: Problem) -> list[Config]:
    forms = ((1, True), (1, False), (2, True), (2, False))
    found = [_config(p, keys, *form) for keys in KEYS[_ROWS][columns(p.size)] for form in forms]
    return [c for c in dict.fromkeys((_default(p), *found)) if paged.refusal(p, c) is None]


refusal, default, configs, estimate, compile, run = functions(
    _of, _of_run, paged.refusal, _default, _configs, paged.estimate, paged.compile, paged.run
)


def workspace(*specs: Any, config: Config) -> tuple[TensorSpec, ...]:
    return paged.workspace(_of(specs), config)
