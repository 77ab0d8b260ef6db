"""A block per tile of queries of one head; keys and values stream past it, by TMA if they lie on 16 bytes."""

from dataclasses import dataclass

import cuda.tile as ct
import torch

from tilery.base.spec import Artifact, Work
from tilery.languages import cutile_glue
from tilery.languages.cutile_glue import LegacyLaunch as Launch
from tilery.parts.attention import FP8, Problem, outputs, pairs, problem, problem_of_run
from tilery.parts.cutile_attention import (
    LOG2E,
    begin,
    config_refusal,
    finish,
    online,
    reach_refusal,
    size_refusal,
    strided,
)
from tilery.parts.fp8 import ceil_div

archs = ("sm_90", "sm_100")  # on others its tiles spill

_ZERO = ct.PaddingMode.ZERO


@dataclass(frozen=True)
class Config:
    tile_m: int  # queries
    tile_n: int  # keys
    num_worker_warps: int = 8  # those that multiply; the compiler adds others that load


# By size of a head, what is likely best first. What of these spills registers, compiled for sm_90, is left out.
_CONFIGS = {
    64: (
        Config(128, 128),
        Config(128, 64),
        Config(64, 128, num_worker_warps=4),
        Config(64, 64, num_worker_warps=4),
    ),
    128: (Config(128, 64), Config(128, 128), Config(64, 64, num_worker_warps=4), Config(64, 128)),
    256: (Config(128, 64), Config(128, 32), Config(64, 64), Config(64, 32)),
}
_FLOAT = (Config(16, 16),)


def refusal(*specs, config: Config | None = None) -> str | None:
    p = problem(outputs(*specs), specs)
    if extra := _extras(p):
        return f"takes plain attention alone, got {', '.join(extra)}"
    why = size_refusal(p.q.dtype, D=p.size, E=p.value) or reach_refusal(q=p.q, k=p.k, v=p.v)
    if why:
        return why
    chosen = config or _default(p)
    sizes = {"tile_m": chosen.tile_m, "tile_n": chosen.tile_n}
    return config_refusal(_blocks(p, chosen), chosen.num_worker_warps, **sizes)


def _extras(p: Problem) -> list[str]:
    asked = {
        "packed sequences": p.cu_q is not None, "fp8": p.q.dtype in FP8, "key_mask": p.key_mask is not None,
        "bias": p.bias is not None, "slopes": p.slopes is not None, "sinks": p.sinks is not None,
        "window": p.window > 0, "softcap": p.softcap > 0,
    }  # fmt: skip
    return [name for name, there in asked.items() if there]


def default(*specs) -> Config:
    return _default(problem(outputs(*specs), specs))


def configs(*specs) -> list[Config]:
    return [c for c in _candidates(problem(outputs(*specs), specs)) if refusal(*specs, config=c) is None]


def _candidates(p: Problem) -> tuple[Config, ...]:
    return _FLOAT if p.q.dtype == torch.float32 else _CONFIGS[min(max(p.size, 64), 256)]


def _default(p: Problem) -> Config:
    """The first whose tile the queries of a sequence fill, at least by half."""
    found = _candidates(p)
    return next((c for c in found if c.tile_m < 2 * p.queries), min(found, key=lambda c: c.tile_m))


def estimate(*specs, config: Config) -> Work:
    """Of a tile in the middle of its sequence: causal ones see half of the keys, about."""
    p = problem(outputs(*specs), specs)
    keys = min(p.keys, ceil_div(pairs(p.queries, p.keys, p.causal, 0), max(p.queries, 1)) + config.tile_n)
    width = p.size + p.value
    moved = (config.tile_m + keys) * width * p.q.dtype.itemsize
    return Work(_blocks(p, config), 2 * config.tile_m * keys * width, moved)


def _blocks(p: Problem, config: Config) -> int:
    return p.batch * p.heads * ceil_div(p.queries, config.tile_m)


def _step(
    q, k, v, b, kv_head, j, place, scale, top, total, acc, D, E, N, CAUSAL, POSITIVE, MASKED
):  # fmt: skip
    """Tile j of the keys."""
    k_tile = ct.load(k, (b, kv_head, 0, j), (1, 1, D, N), order=(0, 2, 3, 1), padding_mode=_ZERO)
    scores = ct.mma(q, k_tile.reshape((D, N)), ct.zeros((q.shape[0], N), ct.float32))
    if not POSITIVE:
        scores = scores * scale
    if MASKED:
        key = j * N + ct.arange(N, dtype=ct.int32).reshape((1, N))
        seen = key < k.shape[1]
        if CAUSAL:
            seen = seen & (key <= place)
        scores = ct.where(seen, scores, float("-inf"))
    # With a positive scale the largest score is the largest logit: it is multiplied as the largest is subtracted.
    top, total, weights, shrink = online(top, total, scores, scale if POSITIVE else 1.0)
    v_tile = ct.load(v, (b, j, kv_head, 0), (1, N, 1, E), padding_mode=_ZERO).reshape((N, E))
    return top, total, ct.mma(weights.astype(v.dtype), v_tile, acc * shrink)


@ct.kernel
def _attention(
    q, k, v, out, scale,
    GROUP: ct.Constant[int], D: ct.Constant[int], E: ct.Constant[int], M: ct.Constant[int], N: ct.Constant[int],
    CAUSAL: ct.Constant[bool], POSITIVE: ct.Constant[bool],
):  # fmt: skip
    queries, keys = q.shape[1], k.shape[1]
    tiles = ct.cdiv(queries, M)
    # Heads that share keys run together.
    pair, rest = divmod(ct.bid(0), tiles * GROUP)
    b, kv_head = divmod(pair, k.shape[2])
    tile, head = rest // GROUP, kv_head * GROUP + rest % GROUP
    outer, end = keys // N, ct.cdiv(keys, N)  # tiles of keys: all queries see those before outer
    if CAUSAL:
        tile = tiles - 1 - tile  # those that see most keys first
    first = tile * M + keys - queries
    if CAUSAL:
        outer, end = min(outer, max(first + 1, 0) // N), min(end, ct.cdiv(max(first + M, 0), N))
    place = first + ct.arange(M, dtype=ct.int32).reshape((M, 1))
    scale = scale * LOG2E
    q_tile = ct.load(q, (b, tile, head, 0), (1, M, 1, D), padding_mode=_ZERO).reshape((M, D))
    top, total = begin(M)
    acc = ct.zeros((M, E), ct.float32)
    for j in range(outer):
        top, total, acc = _step(
            q_tile, k, v, b, kv_head, j, place, scale, top, total, acc, D, E, N, CAUSAL, POSITIVE, False
        )
    for j in range(outer, end):
        top, total, acc = _step(
            q_tile, k, v, b, kv_head, j, place, scale, top, total, acc, D, E, N, CAUSAL, POSITIVE, True
        )
    share, _ = finish(top, total)
    # What lies outside of out is dropped.
    ct.store(out, (b, tile, head, 0), (acc * share).astype(out.dtype).reshape((1, M, 1, E)))


def _launch(p: Problem, config: Config) -> Launch:
    """Of tensors for `run` and of specs for `compile`; all are seen as [B, S, H, D]."""
    q = strided(p.q, (p.batch, p.queries, p.heads, p.size), (*p.q_strides, 1))
    k = strided(p.k, (p.batch, p.keys, p.kv_heads, p.size), (*p.k_strides, 1))
    v = strided(p.v, (p.batch, p.keys, p.kv_heads, p.value), (*p.v_strides, 1))
    out = strided(p.out, (p.batch, p.queries, p.heads, p.value), (*p.out_strides, 1))
    shapes = p.heads // p.kv_heads, p.size, p.value, config.tile_m, config.tile_n
    arguments = (q, k, v, out, float(p.scale), *shapes, p.causal, p.scale > 0)
    kernel = cutile_glue.hinted(_attention, num_worker_warps=config.num_worker_warps)
    return Launch(kernel, _blocks(p, config), arguments)


def compile(specs, config: Config, arch: str) -> Artifact:
    return cutile_glue.legacy_compile(_launch(problem(outputs(*specs), specs), config), arch)


def run(outs, args, config: Config) -> None:
    p = problem_of_run(outs, args)
    if p.keys == 0:  # TMA cannot describe an empty array
        outs[0].zero_()
        return
    cutile_glue.legacy_run(_launch(p, config))
