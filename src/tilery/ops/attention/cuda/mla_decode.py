"""mla_decode in CUDA C++ for Hopper: splits, and the launches of mla_decode.cu and combine_splits.cu.

A block of threads has 64 rows, query tokens times heads, of one sequence and a split of its keys. How a sequence is
split depends on its own length and the config alone.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tilery.base.integers import ceil_div, next_power_of_2
from tilery.base.launch import Launch
from tilery.base.spec import TensorSpec, Work, dtype_name
from tilery.core.kernel import Kernel
from tilery.hardware.gpu import gpu
from tilery.languages import tensor_maps
from tilery.languages.cuda_source import Source
from tilery.languages.tensor_maps import TensorMapOf
from tilery.ops.attention.call import MlaDecodeCall, max_splits
from tilery.ops.attention.cuda.forward import or_null
from tilery.ops.attention.cuda.paged import combination, partial_results

_SOURCE = Source(Path(__file__).with_name("mla_decode.cu"), "mla_decode")
_LATENT, _ROPE = 512, 64  # columns of a key
_ROWS, _KEYS, _STAGES, _THREADS = 64, 64, 2, 512  # of a tile, of a block of keys, of the pipeline, of a block
_FAR = 2**29  # more than rows or keys are numbered
_MAX_SPLITS = 32  # a lane of the combining warp has one
_WHOLE = 2**30  # tokens of a "page" that is a sequence
# Bytes: to align tiles; q, blocks of keys, P; barriers of five pipelines and what is handed on beside tiles.
_SHARED = 1024 + ((1 + _STAGES) * (_LATENT + _ROPE) + _KEYS) * _KEYS * 2 + (3 * _STAGES + 2) * 16 + 4 * _ROWS + 16


@dataclass(frozen=True)
class Config:
    splits: int  # blocks of threads that share the keys of a row, at most
    min_blocks: int  # blocks of 64 keys of a split, where there are so many


class MlaDecode(Kernel):
    archs = ("sm_90",)
    Config = Config

    def refusal(self, call: MlaDecodeCall, config: Config | None = None) -> str | None:
        if (call.latent_dim, call.rope_dim) != (_LATENT, _ROPE):
            got = f"{call.latent_dim} and {call.rope_dim}"
            return f"takes keys of {_LATENT} values of the latent and {_ROPE} turned ones alone, got {got}"
        if call.q.dtype not in (torch.float16, torch.bfloat16):
            return f"multiplies fp16 and bf16 alone, got {dtype_name(call.q.dtype)}"
        if (most := max(call.tokens * call.heads, call.max_keys, _tiles(call) * _MAX_SPLITS)) >= _FAR:
            return f"numbers rows, keys and blocks up to {_FAR}, got {most}"
        for name, x in (("q", call.q), ("q_rope", call.q_rope)):
            if _row_stride(x) is None:
                strides = list(x.strides)
                return f"heads of all tokens of {name} must be equally far apart for TMA to load them, got {strides}"
        for name, (sizes, strides) in _views(call).items():
            if all(sizes) and (why := tensor_maps.heads_refusal(name, getattr(call, name), sizes, strides)):
                return why
        if config is not None and not (1 <= config.splits <= _MAX_SPLITS and config.min_blocks >= 1):
            return f"splits must be 1 to {_MAX_SPLITS} and min_blocks 1 or more, got {config}"
        return None

    def default(self, call: MlaDecodeCall) -> Config:
        """Splits of 2048 keys or more, and at most as many as give one sequence a block on each SM.

        The sums of a split are 128 KB for 64 rows, which are written and read again, beside 2.3 MB of its keys. Not
        measured yet.
        """
        splits = gpu(call.q.device).sms_power_of_2 // next_power_of_2(max(ceil_div(call.rows, _ROWS), 1))
        return Config(max(min(splits, _MAX_SPLITS), 1), min_blocks=32)

    def configs(self, call: MlaDecodeCall) -> list[Config]:
        default = self.default(call)
        found = [default, *(Config(default.splits, blocks) for blocks in (4, 8, 16, 64)), Config(1, 1)]
        return [c for c in dict.fromkeys(found) if self.refusal(call, c) is None]

    def estimate(self, call: MlaDecodeCall, config: Config) -> Work:
        splits, width = _splits(call, config), _LATENT + _ROPE
        keys = ceil_div(call.max_keys, splits)
        nbytes = (keys + _ROWS) * width * call.q.dtype.itemsize
        nbytes += 8 * min(_ROWS, call.rows) * _LATENT if splits > 1 else 0
        return Work(_tiles(call) * splits, 2 * _ROWS * keys * (width + _LATENT), nbytes)

    def workspace(self, call: MlaDecodeCall, config: Config) -> dict[str, TensorSpec]:
        return partial_results(call, _splits(call, config))

    def launches(self, call: MlaDecodeCall, config: Config) -> list[Launch]:
        splits, table, cache = _splits(call, config), call.block_table, call.cache
        partials = (call.partial_out, call.partial_stats) if splits > 1 else (0, 0)
        views = _views(call)
        # There is no map of nothing: q stands for a cache that has no keys, of which nothing is read then.
        cached = (cache, *views["cache"]) if all(cache.shape) else (call.q, *views["q"])
        args = {
            "q_map": TensorMapOf(call.q, *views["q"], (_ROWS,)),
            "q_rope_map": TensorMapOf(call.q_rope, *views["q_rope"], (_ROWS,)),
            "cache_map": TensorMapOf(*cached, (_box_rows(call),)),
            "page_table": or_null(table), "seqlens_k": call.lengths, "out": call.out, "lse": call.lse,
            "partial_out": partials[0], "partial_stats": partials[1], "page_table_stride": call.table_stride,
            "sequences": call.batch, "heads": call.heads, "queries": call.queries,
            "row_tiles": ceil_div(call.rows, _ROWS), "splits": splits, "target_splits": config.splits,
            "min_blocks_per_split": config.min_blocks, "page_size": call.page or _WHOLE, "pages": cache.shape[0],
            "max_seqlen_k": call.max_keys, "softmax_scale": call.softmax_scale,
        }  # fmt: skip
        options = {"threads": _THREADS, "shared": _SHARED}
        found = [Launch(_SOURCE, _tiles(call) * splits, args, {"T": call.q.dtype}, options, pdl=True)]
        return [*found, combination(call, splits)] if splits > 1 else found


def _tiles(call: MlaDecodeCall) -> int:
    return call.batch * ceil_div(call.rows, _ROWS)


def _splits(call: MlaDecodeCall, config: Config) -> int:
    """Splits that can have a key."""
    return max_splits(config.splits, call.max_keys, _KEYS * config.min_blocks)


# Tensor maps


def _box_rows(call: MlaDecodeCall) -> int:
    """Keys of a box: it must not pass the end of a page."""
    return min(call.page or _KEYS, _KEYS)


def _row_stride(x: TensorSpec) -> int | None:
    """From each head to the next, those of all tokens of a sequence in a row; None where there is no such stride."""
    _, tokens, heads, _ = x.shape
    _, by_token, by_head, _ = x.strides
    if heads == 1:
        return by_token
    return by_head if tokens == 1 or by_token == heads * by_head else None


def _views(call: MlaDecodeCall) -> dict[str, Any]:
    """Sizes, innermost first, and strides of all but values: q as [sequences, rows], the cache as [pages, tokens]."""

    def rows(x: TensorSpec) -> Any:
        return (x.shape[3], call.rows, call.batch), (_row_stride(x), x.strides[0])

    pages, page, width = call.cache.shape
    by_page, by_token, _ = call.cache.strides
    return {"q": rows(call.q), "q_rope": rows(call.q_rope), "cache": ((width, page, pages), (by_token, by_page))}


mla_decode = MlaDecode()
