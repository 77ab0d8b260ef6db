"""attention_decode and attention_chunked in CUDA C++ for Hopper: tiles and splits for paged_attention.cu.

Rows of a tile are query tokens times the heads that share keys. An SM works on two tiles of 64 rows: one is multiplied
while the other waits. How a sequence's keys are split depends on its own length and the config alone.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from tilery.base.integers import ceil_div, next_power_of_2
from tilery.base.launch import Host, Launch, Persistent, fill
from tilery.base.spec import TensorSpec, Work, dtype_name
from tilery.core.kernel import Kernel
from tilery.hardware.gpu import gpu
from tilery.languages import tensor_maps
from tilery.languages.cuda_source import Source
from tilery.languages.tensor_maps import TensorMapOf
from tilery.ops.attention.call import PagedCall, max_splits
from tilery.ops.attention.cuda.forward import columns, most_stages, or_null, shared_bytes, threads, window_left

_SOURCE, _COMBINE = (
    Source(Path(__file__).with_name(f"{file}.cu"), file) for file in ("paged_attention", "combine_splits")
)
# Keys of a block, by the rows of a tile and the columns of a head, what is likely best first; more do not fit the
# registers.
_KEYS: dict[int, dict[int, tuple[int, ...]]] = {
    128: {64: (128, 192), 128: (160, 128, 176), 192: (112, 96), 256: (80, 64)},
    64: {64: (128, 64), 128: (64, 32), 192: (32,), 256: ()},
}
_RESIDENT = {128: 1, 64: 2}  # blocks of threads on an SM
_FAR = 2**29  # more than a query sees, or than is numbered
_MAX_SPLITS = 32  # a lane of a warp has one
_WHOLE = 2**30  # tokens of a "page" that is a sequence
_COMBINING = 128  # threads of a block that combines

_Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Config:
    block_n: int  # keys
    stages: int  # blocks of keys or of values in the pipeline
    splits: int = 1  # blocks of threads that share the keys of a row, at most
    multicast: int = 1  # blocks of a cluster that load keys and values for each other
    persistent: bool = True  # blocks go from tile to tile, else each has one
    block_m: int = 128  # rows
    min_blocks: int = 1  # blocks of keys of a split, where there are so many

    # In files of tuned configs.
    old_names: ClassVar[dict[str, str]] = {"share": "multicast", "least": "min_blocks"}


class Paged(Kernel):
    """What both kernels have in common."""

    archs = ("sm_90",)
    Config = Config

    def refusal(self, call: PagedCall, config: Config | None = None) -> str | None:
        if call.q.dtype not in (torch.float16, torch.bfloat16):
            return f"multiplies fp16 and bf16 alone, got {dtype_name(call.q.dtype)}"
        asked = {
            "an fp8 cache": call.k_scale is not None, "sinks": call.sinks is not None, "softcap": call.softcap > 0,
        }  # fmt: skip
        if extras := [name for name, given in asked.items() if given]:
            return f"takes no more than a window, got {', '.join(extras)}"
        if why := _group_refusal(call, max(_KEYS)):
            return why
        tiles = 2 * call.batch * call.kv_heads * ceil_div(call.rows, min(_KEYS))
        if (most := max(call.tokens * call.heads, call.max_keys, tiles * _MAX_SPLITS)) >= _FAR:
            return f"numbers rows, keys and tiles up to {_FAR}, got {most}"
        if _token_stride(call) is None:
            return f"tokens of q must be equally far apart for TMA to load them, got strides {list(call.q.strides)}"
        views = {"q": _query_view(call), "k_cache": _cache_view(call), "v_cache": _cache_view(call)}
        for name, (sizes, strides) in views.items():
            if all(sizes) and (why := tensor_maps.heads_refusal(name, getattr(call, name), sizes, strides)):
                return why
        return None if config is None else self._config_refusal(call, config)

    def _config_refusal(self, call: PagedCall, config: Config) -> str | None:
        if config.block_m not in _KEYS:
            return f"block_m must be {' or '.join(map(str, _KEYS))}, got {config.block_m}"
        if why := _group_refusal(call, config.block_m):
            return why
        known = _KEYS[config.block_m][columns(call.head_dim)]
        if config.block_n not in known:
            what = f"block_n of heads of {call.head_dim} in tiles of {config.block_m} rows must be"
            return f"{what} {' or '.join(map(str, known)) or 'that of larger tiles'}, got {config.block_n}"
        most = self.most_stages(call, config.block_m, config.block_n)
        if not 2 <= config.stages <= most:
            return f"stages must be 2 to {most} for shared memory to hold them, got {config.stages}"
        if not 1 <= config.splits <= _MAX_SPLITS or config.multicast not in (1, 2) or config.min_blocks < 1:
            got = f"{config.splits}, {config.multicast} and {config.min_blocks}"
            return f"splits must be 1 to {_MAX_SPLITS}, multicast 1 or 2 and min_blocks 1 or more, got {got}"
        return None

    def most_stages(self, call: PagedCall, block_m: int, block_n: int) -> int:
        """Stages that shared memory has room for."""
        return most_stages(gpu(call.q.device), block_m, block_n, columns(call.head_dim), _RESIDENT[block_m])

    def estimate(self, call: PagedCall, config: Config) -> Work:
        splits = _splits(call, config)
        keys = ceil_div(call.visible_keys, splits)
        moved = (keys + min(call.rows, config.block_m)) * 2 * call.head_dim * call.q.dtype.itemsize
        return Work(_blocks(call, config) * splits, 4 * config.block_m * keys * columns(call.head_dim), moved)

    def workspace(self, call: PagedCall, config: Config) -> dict[str, TensorSpec]:
        """The results of splits. For a cache without pages, a page that no table names: TMA has no map of nothing."""
        found, where = partial_results(call, _splits(call, config)), call.q.device
        if not all(call.k_cache.shape[:2]):
            page = 1, max(call.k_cache.shape[1], 1), call.kv_heads, call.head_dim
            found["empty_page"] = TensorSpec.contiguous(page, call.q.dtype, where)
            if call.block_table is not None:
                found["empty_table"] = TensorSpec.contiguous(call.block_table.shape, torch.int32, where)
        return found

    def launches(self, call: PagedCall, config: Config) -> list[Launch | Host]:
        found: list[Launch | Host] = []
        table, caches = call.block_table, (call.k_cache, call.v_cache)
        if not all(call.k_cache.shape[:2]):
            caches = call.empty_page, call.empty_page
            if table is not None:
                table = call.empty_table
                found.append(fill(table, -1))
        splits, rows_of_query = _splits(call, config), _query_rows(call, config)
        partials = (call.partial_out, call.partial_stats) if splits > 1 else (0, 0)
        args = {
            **_maps(call, config, rows_of_query, *caches), "page_table": or_null(table),
            "cu_seqlens_q": or_null(call.cu_seqlens_q), "seqlens_k": call.lengths, "out": call.out,
            "partial_out": partials[0], "partial_stats": partials[1],
            "page_table_stride": 0 if table is None else table.stride(0), "sequences": call.batch,
            "tokens": call.tokens, "kv_heads": call.kv_heads, "heads_per_kv": call.group,
            "tiles_per_head": _tiles(call, config), "splits": splits,
            "target_splits": config.splits if splits > 1 else 1, "min_blocks_per_split": config.min_blocks,
            "q_rows": rows_of_query, "page_size": _WHOLE if table is None else call.page,
            "max_seqlen_q": call.queries, "max_seqlen_k": call.max_keys,
            "window_left": window_left(call.effective_window), "softmax_scale": call.softmax_scale,
        }  # fmt: skip
        constants = {
            "T": call.q.dtype, "HEAD_DIM": call.head_dim, "BLOCK_N": config.block_n,
            "WARPGROUPS": config.block_m // 64, "STAGES": config.stages, "MULTICAST": config.multicast,
        }  # fmt: skip
        shared = shared_bytes(config.block_m, config.block_n, config.stages, columns(call.head_dim))
        options = {"threads": threads(config.block_m), "shared": shared}
        blocks = max(_blocks(call, config) * splits, config.multicast)
        grid = Persistent(blocks) if config.persistent else blocks
        found.append(Launch(_SOURCE, grid, args, constants, options, cluster=config.multicast, pdl=True))
        if splits > 1:
            found.append(combination(call, splits))
        return found


def partial_results(call: PagedCall, splits: int) -> dict[str, TensorSpec]:
    """Workspace of splits: sums [splits, T, H, D], and maxima and sums of exponentials [2, splits, T, H]."""
    if splits == 1:
        return {}
    shape, where = (splits, call.tokens, call.heads), call.q.device
    return {
        "partial_out": TensorSpec.contiguous((*shape, call.head_dim), torch.float32, where),
        "partial_stats": TensorSpec.contiguous((2, *shape), torch.float32, where),
    }


def combination(call: PagedCall, splits: int) -> Launch:
    """The launch that makes out, and lse where the call has one, of the splits' results. A warp has a row."""
    rows = call.tokens * call.heads
    args = {
        "partial_out": call.partial_out, "partial_stats": call.partial_stats, "out": call.out, "lse": or_null(call.lse),
        "rows": rows, "splits": splits, "heads": call.heads, "queries": call.queries,
    }  # fmt: skip
    constants = {"T": call.q.dtype, "HEAD_DIM": call.head_dim}
    grid, options = ceil_div(rows, _COMBINING // 32), {"threads": _COMBINING}
    return Launch(_COMBINE, grid, args, constants, options, pdl=True)


def _group_refusal(call: PagedCall, rows: int) -> str | None:
    """A tile has all heads of a query; the next begins where a power of two ends."""
    if call.group <= rows and (call.rows <= rows or not call.group & (call.group - 1)):
        return None
    return f"heads that share keys must be a power of two up to {rows} for TMA to load as rows, got {call.group}"


def _tiles(call: PagedCall, config: Config) -> int:
    """Tiles of a sequence and a key head, each for the blocks of a cluster."""
    return ceil_div(call.rows, config.block_m * config.multicast)


def _blocks(call: PagedCall, config: Config) -> int:
    """Blocks of threads for each split."""
    return call.batch * call.kv_heads * _tiles(call, config) * config.multicast


def _splits(call: PagedCall, config: Config) -> int:
    """Splits that can have a key; a window begins anywhere in a block."""
    keys = call.visible_keys + (config.block_n if call.effective_window else 0)
    return max_splits(config.splits, keys, config.block_n * config.min_blocks)


# Tensor maps


def _token_stride(call: PagedCall) -> int | None:
    """From each query token of all sequences to the next; None where there is no such stride."""
    shape, strides = call.q.shape, call.q.strides
    if len(shape) == 3 or shape[1] == 1:
        return strides[0]
    return strides[1] if shape[0] <= 1 or strides[0] == shape[1] * strides[1] else None


def _query_view(call: PagedCall) -> tuple[_Sizes, _Sizes]:
    """q as [tokens, key heads, heads that share one, values]: sizes, innermost first, and strides of all but values."""
    head, token = call.q.strides[-2], _token_stride(call)
    assert token is not None
    return (call.head_dim, call.group, call.kv_heads, call.tokens), (head, head * call.group, token)


def _cache_view(call: PagedCall, cache: Any = None) -> tuple[_Sizes, _Sizes]:
    """A cache as [pages, key heads, tokens, values], likewise."""
    cache = call.k_cache if cache is None else cache
    (pages, page, kv_heads, size), (by_page, by_token, by_head, _) = cache.shape, cache.strides
    return (size, page, kv_heads, pages), (by_token, by_head, by_page)


def _query_rows(call: PagedCall, config: Config) -> int:
    """Rows of a tile that are loaded: those of whole queries."""
    return min(call.queries, config.block_m // call.group) * call.group


def _maps(call: PagedCall, config: Config, rows_of_query: int, k: Any, v: Any) -> dict[str, TensorMapOf]:
    """Maps of q, k_cache and v_cache.

    Keys of a page that is not in the cache are NaN, so that every row that sees one of them is; its values are zeros.
    """
    keys = config.block_n // config.multicast
    rows = keys & -keys
    rows = rows if call.block_table is None else min(k.shape[1], rows)  # boxes must not pass the end of a page
    box = call.group, 1, rows_of_query // call.group
    return {
        "q_map": TensorMapOf(call.q, *_query_view(call), box),
        "k_map": TensorMapOf(k, *_cache_view(call, k), (rows,), nan=call.q.dtype),
        "v_map": TensorMapOf(v, *_cache_view(call, v), (rows,)),
    }


class AttentionDecode(Paged):
    """Two blocks an SM go from split to split, and their pipelines do not run empty in between.

    Nothing here looks at the batch or at the most keys of a sequence: it must be split alike in any.
    """

    min_keys = 128  # of a split: with fewer, what it writes of them costs more than what is gained

    def _config(self, call: PagedCall, block_m: int, block_n: int) -> Config:
        """Many splits read fast what is one sequence; but each one's result for every row is written and read again."""
        most = gpu(call.q.device).sms_power_of_2  # tiles of one sequence
        tiles = min(max(1024 // max(call.rows, 1), most // 4), most)
        splits = min(next_power_of_2(max(tiles // call.kv_heads, 1)), _MAX_SPLITS)
        stages, min_blocks = self.most_stages(call, block_m, block_n), max(self.min_keys // block_n, 1)
        return Config(block_n, stages, splits, block_m=block_m, min_blocks=min_blocks)

    def default(self, call: PagedCall) -> Config:
        """Tiles of 128 rows where there are more than 64, or keys would be read twice."""
        width = columns(call.head_dim)
        block_m = 64 if call.rows <= 64 and _KEYS[64][width] else 128
        return self._config(call, block_m, _KEYS[block_m][width][0])

    def configs(self, call: PagedCall) -> list[Config]:
        sizes, width = (64, 128) if call.rows <= 64 else (128,), columns(call.head_dim)
        found = [self.default(call)]
        for config in (self._config(call, m, n) for m in sizes for n in _KEYS[m][width]):
            found += [replace(config, splits=config.splits * 2), replace(config, splits=max(config.splits // 2, 1))]
            found += [config, replace(config, min_blocks=config.min_blocks * 2), replace(config, persistent=False)]
        return [c for c in dict.fromkeys(found) if self.refusal(call, c) is None]


class AttentionChunked(Paged):
    """Tiles of 128 rows; where tiles are few, keys are split too."""

    rows = 128  # of a tile: query tokens times the heads that share keys
    min_blocks = 8  # blocks of keys, for a split to be worth its sums

    def _config(self, call: PagedCall, block_n: int, multicast: int = 1, persistent: bool = True) -> Config:
        """With as many splits as fill the SMs once, were all tokens of one sequence."""
        tiles = ceil_div(call.tokens * call.group, self.rows * multicast) * multicast * call.kv_heads
        fill_sms = gpu(call.q.device).sms // max(tiles, 1)
        splits = min(fill_sms, call.visible_keys // (self.min_blocks * block_n), _MAX_SPLITS)
        return Config(block_n, self.most_stages(call, self.rows, block_n), max(splits, 1), multicast, persistent)

    def default(self, call: PagedCall) -> Config:
        """Persistent: to start a block for each tile, also those that short chunks do not have, would take longer."""
        return self._config(call, _KEYS[self.rows][columns(call.head_dim)][0])

    def configs(self, call: PagedCall) -> list[Config]:
        forms = ((1, True), (1, False), (2, True), (2, False))
        found = [self._config(call, keys, *form) for keys in _KEYS[self.rows][columns(call.head_dim)] for form in forms]
        return [c for c in dict.fromkeys((self.default(call), *found)) if self.refusal(call, c) is None]


attention_decode, attention_chunked = AttentionDecode(), AttentionChunked()
