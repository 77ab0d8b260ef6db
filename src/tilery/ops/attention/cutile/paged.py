"""attention_decode and mla_decode in cuTile: how keys are split, and the launches of paged_kernel.py.

Nothing here looks at the batch: a sequence must be split alike in any.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tilery.base.integers import ceil_div, next_power_of_2
from tilery.base.launch import Argument, Host, Launch
from tilery.base.spec import TensorSpec, Work
from tilery.core.kernel import Kernel
from tilery.hardware.gpu import gpu
from tilery.ops.attention.call import MlaDecodeCall, PagedCall
from tilery.ops.attention.cutile.paged_kernel import combine, paged_attention
from tilery.ops.attention.cutile.softmax import ARCHS, config_refusal, reach_refusal, size_refusal
from tilery.ops.attention.indices import fill_without_keys

_COMBINED = 4096  # values that a block of `combine` holds
_TAIL = 16  # keys of MLA that are masked at a time: to be values they are in registers then
_MIN_ROWS = 16  # of a product by tensor cores
_FAR = 2**30  # keys: they are numbered in int32, as are those of the tiles behind the last


@dataclass(frozen=True)
class Config:
    rows: int  # of a block: query tokens times heads that share keys
    keys: int
    splits: int  # blocks that share the keys of a row, at most
    num_worker_warps: int = 4


class Operands(NamedTuple):
    """What a kernel reads. Keys of MLA are also the values: then v is None, and keys have a rope."""

    k: Any  # [pages, page, kv_heads, D], or [B, S, kv_heads, D] without a table
    v: Any = None
    q_rope: Any = None  # [B, Q, H, R]
    k_rope: Any = None


class Paged(Kernel):
    """What both kernels have in common."""

    archs = ARCHS
    Config = Config
    size_name: str  # what the size of a head is called

    def operands(self, call: PagedCall) -> Operands:
        raise NotImplementedError

    def candidates(self, call: PagedCall) -> list[Config]:
        """Likely the best first; those that spill registers, compiled for sm_90, are left out."""
        raise NotImplementedError

    def refusal(self, call: PagedCall, config: Config | None = None) -> str | None:
        config, x = config or self.default(call), self.operands(call)
        arrays = {"q": call.q, "the cache": x.k} | ({} if x.q_rope is None else {"q_rope": x.q_rope})
        why = size_refusal(call.q.dtype, **{self.size_name: call.head_dim}) or reach_refusal(**arrays)
        if why:
            return why
        if call.max_keys >= _FAR:
            return f"numbers keys up to {_FAR}, got {call.max_keys}"
        if config.rows < _MIN_ROWS:
            return f"rows must be {_MIN_ROWS} or more, as of a product by tensor cores, got {config.rows}"
        rows = call.tokens * call.heads
        most = max(_blocks(call, config), rows * (call.head_dim // _piece(call, config)))
        sizes = {"rows": config.rows, "keys": config.keys, "splits": config.splits}
        return config_refusal(most, config.num_worker_warps, **sizes)

    def default(self, call: PagedCall) -> Config:
        return self.candidates(call)[0]

    def configs(self, call: PagedCall) -> list[Config]:
        return [c for c in self.candidates(call) if self.refusal(call, c) is None]

    def workspace(self, call: PagedCall, config: Config) -> dict[str, TensorSpec]:
        """partial_out and partial_stats; none for a single split, which writes the result itself."""
        splits, rows, where = _splits(call, config), call.tokens * call.heads, call.q.device
        if splits == 1:
            return {}
        return {
            "partial_out": TensorSpec.contiguous((splits, rows, call.head_dim), torch.float32, where),
            "partial_stats": TensorSpec.contiguous((2, splits, rows), torch.float32, where),
        }

    def estimate(self, call: PagedCall, config: Config) -> Work:
        splits, (tokens, heads), x = _splits(call, config), _tile(call, config), self.operands(call)
        keys, size = ceil_div(call.max_keys, splits), call.head_dim
        rope = 0 if x.q_rope is None else x.q_rope.shape[3]
        read = keys * (size + rope if x.v is None else 2 * size) * x.k.dtype.itemsize
        written = tokens * heads * size * (8 if splits > 1 else call.q.dtype.itemsize)
        return Work(_blocks(call, config), 2 * tokens * heads * keys * (2 * size + rope), read + written)

    def launches(self, call: PagedCall, config: Config) -> list[Launch | Host]:
        if call.max_keys == 0 or call.key_cache.shape[0] == 0:  # TMA cannot describe an empty array
            return [Host(fill_without_keys, (call.out, call.lse, call.lengths, call.max_keys))]
        (batch, queries, heads, size), lse = call.q.shape, call.lse
        x, splits, kv_heads, group = self.operands(call), _splits(call, config), call.kv_heads, call.group
        q, out = _grouped(call.q, kv_heads), _grouped(call.out, kv_heads)
        # What is not there is not read: any tensor will do.
        table = x.k if call.block_table is None else call.block_table
        grouped_lse = partial_out = partial_stats = out
        if lse is not None:
            strides = heads * queries, 1, group * queries, queries
            grouped_lse = lse.view((batch, queries, kv_heads, group), strides)
        if splits > 1:
            shape, strides = (splits * batch, queries, kv_heads, group), (queries * heads, heads, group, 1)
            partial_out = call.partial_out.view((*shape, size), (*(step * size for step in strides), 1))
            partial_stats = call.partial_stats.view((2 * shape[0], *shape[1:]), strides)
        tokens, heads_of_block = _tile(call, config)
        args = {
            "q": q, "q_rope": q if x.q_rope is None else _grouped(x.q_rope, kv_heads), "k": x.k,
            "k_rope": x.k if x.k_rope is None else x.k_rope, "v": x.k if x.v is None else x.v,
            "lengths": call.lengths, "table": table, "out": out, "lse": grouped_lse, "partial_out": partial_out,
            "partial_stats": partial_stats, "scale": call.softmax_scale,
        }  # fmt: skip
        constants = {
            "D": size, "ROPE": 0 if x.q_rope is None else x.q_rope.shape[3], "TOKENS": tokens,
            "HEADS": heads_of_block, "N": config.keys, "TAIL": _TAIL if x.v is None else config.keys,
            "PAGE": call.page, "SPLITS": config.splits, "LAUNCHED_SPLITS": splits, "KEYS_ARE_VALUES": x.v is None,
            "LSE": lse is not None,
        }  # fmt: skip
        hints = {"num_worker_warps": config.num_worker_warps}
        found: list[Launch | Host] = [Launch(paged_attention, _blocks(call, config), args, constants, hints)]
        if splits > 1:
            found.append(self._combine(call, config, x.k, table))
        return found

    def _combine(self, call: PagedCall, config: Config, k: Any, table: Any) -> Launch:
        size, rows, piece = call.head_dim, call.tokens * call.heads, _piece(call, config)
        out = call.out.view((rows, size), (size, 1))
        args = {
            "partial_out": call.partial_out, "partial_stats": call.partial_stats, "lengths": call.lengths, "k": k,
            "table": table, "out": out, "lse": out if call.lse is None else call.lse,
        }  # fmt: skip
        constants = {
            "QUERIES": call.queries, "HEADS": call.heads, "N": config.keys, "PAGE": call.page,
            "SPLITS": config.splits, "BLOCK_SPLITS": next_power_of_2(_splits(call, config)), "PIECE": piece,
            "LSE": call.lse is not None,
        }  # fmt: skip
        return Launch(combine, rows * ceil_div(size, piece), args, constants)


def _tile(call: PagedCall, config: Config) -> tuple[int, int]:
    """Query tokens and heads of a block; there may be fewer of them."""
    tokens = min(next_power_of_2(call.queries), config.rows // min(next_power_of_2(call.group), config.rows))
    return tokens, config.rows // tokens


def _splits(call: PagedCall, config: Config) -> int:
    """Number of splits that are launched: no more than the longest sequence can fill."""
    return max(min(config.splits, ceil_div(call.max_keys, config.keys)), 1)


def _blocks(call: PagedCall, config: Config) -> int:
    tokens, heads = _tile(call, config)
    tiles = ceil_div(call.queries, tokens) * ceil_div(call.group, heads)
    return call.batch * call.kv_heads * tiles * _splits(call, config)


def _piece(call: PagedCall, config: Config) -> int:
    """Values of a row that a block of `combine` takes."""
    return min(call.head_dim, max(_COMBINED // next_power_of_2(_splits(call, config)), 16))


def _grouped(x: Argument, kv_heads: int) -> Argument:
    """[B, Q, H, D] as [B, Q, kv_heads, heads that share keys, D]."""
    (batch, queries, heads, size), (a, b, c, _) = x.shape, x.strides
    group = heads // kv_heads
    return x.view((batch, queries, kv_heads, group, size), (a, b, c * group, c, 1))


class AttentionDecode(Paged):
    size_name = "D"

    def operands(self, call: PagedCall) -> Operands:
        return Operands(call.k_cache, call.v_cache)

    def refusal(self, call: PagedCall, config: Config | None = None) -> str | None:
        asked = {
            "fp8": call.k_scale is not None, "sinks": call.sinks is not None, "window": call.window > 0,
            "softcap": call.softcap > 0,
        }  # fmt: skip
        if extras := [name for name, there in asked.items() if there]:
            return f"takes plain attention alone, got {', '.join(extras)}"
        return super().refusal(call, config)

    def candidates(self, call: PagedCall) -> list[Config]:
        """Few rows by mma.sync, many by wgmma, which takes 64 of them; fp32 without tensor cores."""
        splits = max(gpu(call.q.device).sms_power_of_2 // next_power_of_2(call.kv_heads), 1)
        if call.q.dtype == torch.float32:
            return [Config(16, 16, splits, num_worker_warps=8)]
        narrow = Config(64, 32, splits, num_worker_warps=8)
        if call.head_dim > 128:
            return [narrow]
        few, many = [Config(16, 64, splits), Config(16, 32, splits)], [Config(64, 64, splits), narrow]
        caches = call.k_cache, call.v_cache
        if not all(x.aligned and not any(step * x.dtype.itemsize % 16 for step in x.strides[:3]) for x in caches):
            few, many = few[1:], many[1:]  # without TMA 64 keys pass through registers: spilled, compiled in 90 s
        return few + many if call.rows <= 16 else many


class MlaDecode(Paged):
    size_name = "L"

    def operands(self, call: MlaDecodeCall) -> Operands:
        latent, rope = call.latent_dim, call.rope_dim
        return Operands(_columns(call.cache, 0, latent), q_rope=call.q_rope, k_rope=_columns(call.cache, latent, rope))

    def candidates(self, call: MlaDecodeCall) -> list[Config]:
        """64 rows even where there are fewer: without wgmma keys that are values too spill registers."""
        if call.q.dtype == torch.float32:
            return [Config(16, 16, 64, num_worker_warps=8)]
        return [Config(64, keys, splits, num_worker_warps=8) for splits in (32, 16, 64) for keys in (64, 32)]


def _columns(cache: Argument, first: int, size: int) -> Argument:
    """Columns of the cache, as those of its one head; they lie on 16 bytes if the cache does."""
    (pages, tokens, _), (page, token, _) = cache.shape, cache.strides
    return cache.view((pages, tokens, 1, size), (page, token, token, 1), first)


attention_decode, mla_decode = AttentionDecode(), MlaDecode()
