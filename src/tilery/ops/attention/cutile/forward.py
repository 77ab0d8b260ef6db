"""attention in cuTile: a block per tile of queries of one head; keys and values stream past it.

They come by TMA if they lie on 16 bytes.
"""

from dataclasses import dataclass

import cuda.tile as ct
import torch

from tilery.base.integers import ceil_div
from tilery.base.launch import Host, Launch
from tilery.base.spec import Work
from tilery.core.kernel import Kernel
from tilery.ops.attention.call import AttentionCall
from tilery.ops.attention.cutile.softmax import (
    ARCHS,
    LOG2E,
    begin_softmax,
    config_refusal,
    finish_softmax,
    online_softmax,
    reach_refusal,
    size_refusal,
)

_ZERO = ct.PaddingMode.ZERO


def _step(q, k, v, b, kv_head, j, position, scale, row_max, row_sum, acc, D, E, N, CAUSAL, POSITIVE, MASKED):
    """Tile j of the keys."""
    k_tile = ct.load(k, (b, kv_head, 0, j), (1, 1, D, N), order=(0, 2, 3, 1), padding_mode=_ZERO)
    scores = ct.mma(q, k_tile.reshape((D, N)), ct.zeros((q.shape[0], N), ct.float32))
    if not POSITIVE:
        scores = scores * scale
    if MASKED:
        key = j * N + ct.arange(N, dtype=ct.int32).reshape((1, N))
        visible = key < k.shape[1]
        if CAUSAL:
            visible = visible & (key <= position)
        scores = ct.where(visible, scores, float("-inf"))
    # With a positive scale the largest score is the largest logit: it is multiplied as the largest is subtracted.
    row_max, row_sum, p, rescale = online_softmax(row_max, row_sum, scores, scale if POSITIVE else 1.0)
    v_tile = ct.load(v, (b, j, kv_head, 0), (1, N, 1, E), padding_mode=_ZERO).reshape((N, E))
    return row_max, row_sum, ct.mma(p.astype(v.dtype), v_tile, acc * rescale)


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
    position = first + ct.arange(M, dtype=ct.int32).reshape((M, 1))
    scale = scale * LOG2E
    q_tile = ct.load(q, (b, tile, head, 0), (1, M, 1, D), padding_mode=_ZERO).reshape((M, D))
    row_max, row_sum = begin_softmax(M)
    acc = ct.zeros((M, E), ct.float32)
    for j in range(outer):
        row_max, row_sum, acc = _step(
            q_tile, k, v, b, kv_head, j, position, scale, row_max, row_sum, acc, D, E, N, CAUSAL, POSITIVE, False
        )
    for j in range(outer, end):
        row_max, row_sum, acc = _step(
            q_tile, k, v, b, kv_head, j, position, scale, row_max, row_sum, acc, D, E, N, CAUSAL, POSITIVE, True
        )
    inverse, _ = finish_softmax(row_max, row_sum)
    # What lies outside of out is dropped.
    ct.store(out, (b, tile, head, 0), (acc * inverse).astype(out.dtype).reshape((1, M, 1, E)))


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
_FP32 = (Config(16, 16),)


class Attention(Kernel):
    archs = ARCHS
    Config = Config

    def refusal(self, call: AttentionCall, config: Config | None = None) -> str | None:
        asked = {
            "packed sequences": call.packed, "fp8": call.is_fp8, "key_mask": call.key_mask is not None,
            "bias": call.bias is not None, "slopes": call.slopes is not None, "sinks": call.sinks is not None,
            "window": call.effective_window > 0, "softcap": call.softcap > 0,
        }  # fmt: skip
        if extras := [name for name, there in asked.items() if there]:
            return f"takes plain attention alone, got {', '.join(extras)}"
        why = size_refusal(call.q.dtype, D=call.head_dim, E=call.value_dim)
        why = why or reach_refusal(q=call.q, k=call.k, v=call.v)
        if why:
            return why
        chosen = config or self.default(call)
        sizes = {"tile_m": chosen.tile_m, "tile_n": chosen.tile_n}
        return config_refusal(_blocks(call, chosen), chosen.num_worker_warps, **sizes)

    def default(self, call: AttentionCall) -> Config:
        """The first whose tile the queries of a sequence fill, at least by half."""
        found = _candidates(call)
        return next((c for c in found if c.tile_m < 2 * call.queries), min(found, key=lambda c: c.tile_m))

    def configs(self, call: AttentionCall) -> list[Config]:
        return [c for c in _candidates(call) if self.refusal(call, c) is None]

    def estimate(self, call: AttentionCall, config: Config) -> Work:
        keys, width = call.keys_of_tile(config.tile_n), call.head_dim + call.value_dim
        moved = (config.tile_m + keys) * width * call.q.dtype.itemsize
        return Work(_blocks(call, config), 2 * config.tile_m * keys * width, moved)

    def launches(self, call: AttentionCall, config: Config) -> list[Launch | Host]:
        """All tensors are seen as [B, S, H, D]."""
        if call.keys == 0:  # TMA cannot describe an empty array
            return [Host(torch.Tensor.zero_, (call.out,))]
        q, k, v, out = (
            x.view((call.batch, tokens, heads, x.shape[-1]), (*call.strides(x), 1))
            for x, tokens, heads in (
                (call.q, call.queries, call.heads),
                (call.k, call.keys, call.kv_heads),
                (call.v, call.keys, call.kv_heads),
                (call.out, call.queries, call.heads),
            )
        )
        constants = {
            "GROUP": call.group, "D": call.head_dim, "E": call.value_dim, "M": config.tile_m, "N": config.tile_n,
            "CAUSAL": call.causal, "POSITIVE": call.scale_is_positive,
        }  # fmt: skip
        args = {"q": q, "k": k, "v": v, "out": out, "scale": call.softmax_scale}
        hints = {"num_worker_warps": config.num_worker_warps}
        return [Launch(_attention, _blocks(call, config), args, constants, hints)]


def _candidates(call: AttentionCall) -> tuple[Config, ...]:
    return _FP32 if call.q.dtype == torch.float32 else _CONFIGS[min(max(call.head_dim, 64), 256)]


def _blocks(call: AttentionCall, config: Config) -> int:
    return call.batch * call.heads * ceil_div(call.queries, config.tile_m)


attention = Attention()
