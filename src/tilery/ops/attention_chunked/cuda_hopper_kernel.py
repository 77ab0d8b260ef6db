"""TMA and wgmma for sm_90: tiles of 128 rows, pages fetched by their number; where tiles are few, keys are cut too."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tilery.backends import cuda_glue, tensor_maps
from tilery.ops.attention_chunked import outputs, queries
from tilery.parts import hopper_attention
from tilery.parts.fp8 import ceil_div
from tilery.parts.hopper_attention import archs, columns, fitting
from tilery.parts.kernels import functions
from tilery.spec import Artifact, TensorSpec, Work, dtype_name

__all__ = ["Config", "archs", "compile", "configs", "default", "estimate", "refusal", "run", "workspace"]

_SOURCE = Path(__file__).parent / "hopper.cu"
_ROWS = 128  # of a tile: query tokens times the heads that share keys
# Of a block by the columns of a head, what is likely best first; more do not fit the registers.
_KEYS = {64: (128, 192), 128: (160, 128, 176), 192: (112, 96), 256: (80, 64)}
_KEPT = 4096  # launches' maps: a model has one or two for each of its layers
_FAR = 2**29  # more than a query sees, or than is numbered
_MOST_SPLITS = 32  # a lane of a warp has one
_PROCESSORS = 132  # of an H200
_LEAST = 8  # blocks of keys, for a split to be worth its sums


@dataclass(frozen=True)
class Config:
    block_n: int  # keys
    stages: int  # blocks of keys or of values that are under way
    splits: int = 1  # blocks of threads that share the keys of a row, at most
    share: int = 1  # blocks of a cluster that fetch keys and values for each other
    persistent: bool = True  # blocks go from tile to tile, else each has one


class _Problem(NamedTuple):
    """Of specs for a plan, of tensors for a run; sizes are read once."""

    q: Any
    k: Any
    v: Any
    starts: Any
    lengths: Any
    table: Any
    out: Any
    tokens: int
    heads: int
    size: int
    pages: int
    page: int
    kv_heads: int
    group: int  # heads that share keys
    sequences: int
    bound: int  # keys of a sequence, at most
    most: int  # queries of one
    window: int
    scale: float
    extras: tuple[str, ...] = ()  # what is asked for beyond that

    @property
    def keys(self) -> int:
        """That any query of a sequence sees, at most."""
        return min(self.bound, self.most + self.window - 1) if self.window else self.bound

    def tiles(self, tokens: int, share: int) -> int:
        """Of a kv head, each for `share` blocks."""
        return ceil_div(tokens * self.group, _ROWS * share)

    def blocks(self, share: int) -> int:
        """Of threads, for each split."""
        return self.sequences * self.kv_heads * self.tiles(self.most, share) * share

    def splits(self, config: Config) -> int:
        """Those that can have a key; a window begins anywhere in a block."""
        keys = self.keys + (config.block_n if self.window else 0)
        return max(min(config.splits, ceil_div(keys, config.block_n)), 1)


def _problem(
    outs: Any, tensors: tuple[Any, ...], window: int, most: int, scale: float | None, *extras: str
) -> _Problem:
    q, k, _, _, _, table = tensors
    (tokens, heads, size), (pages, page, kv_heads, _), (sequences, row) = q.shape, k.shape, table.shape
    made = tokens, heads, size, pages, page, kv_heads, heads // kv_heads, sequences, row * page
    return _Problem(*tensors, outs[0], *made, queries(q, most), window, size**-0.5 if scale is None else scale, extras)


def _of(specs: tuple[Any, ...]) -> _Problem:
    """Of all arguments but the scale."""
    *tensors, k_scale, _, sinks, window, softcap, most = specs
    asked = {"an fp8 cache": k_scale is not None, "sinks": sinks is not None, "softcap": softcap > 0}
    extras = (name for name, there in asked.items() if there)
    return _problem(outputs(*specs), tuple(tensors), window, most, None, *extras)


def _of_run(outs: Any, args: tuple[Any, ...]) -> _Problem:
    return _problem(outs, args[:6], args[10], args[12], args[9])


def _refusal(p: _Problem, config: Config | None) -> str | None:
    if p.q.dtype not in (torch.float16, torch.bfloat16):
        return f"multiplies fp16 and bf16 alone, got {dtype_name(p.q.dtype)}"
    if p.extras:
        return f"takes no more than a window, got {', '.join(p.extras)}"
    if p.group > _ROWS or p.group & (p.group - 1):
        return f"heads that share keys must be a power of two up to {_ROWS} for TMA to fetch as rows, got {p.group}"
    most = max(p.tokens * p.heads, p.bound, p.blocks(share=2) * _MOST_SPLITS)
    if most >= _FAR:
        return f"numbers rows, keys and tiles up to {_FAR}, got {most}"
    q, cache = _views(p.q.shape, p.q.strides, p.k.shape, p.k.strides)
    for name, x, view in (("q", p.q, q), ("k_cache", p.k, cache), ("v_cache", p.v, cache)):
        if all(view[0]) and (why := tensor_maps.heads_refusal(name, x, *view)):
            return why
    return None if config is None else _config_refusal(p, config)


def _config_refusal(p: _Problem, config: Config) -> str | None:
    width = columns(p.size)
    if config.block_n not in _KEYS[width]:
        known = " or ".join(map(str, _KEYS[width]))
        return f"block_n of heads of {p.size} must be {known}, got {config.block_n}"
    most = fitting(_ROWS, config.block_n, width)
    if not 2 <= config.stages <= most:
        return f"stages must be 2 to {most} for shared memory to hold them, got {config.stages}"
    if not 1 <= config.splits <= _MOST_SPLITS or config.share not in (1, 2):
        return f"splits must be 1 to {_MOST_SPLITS} and share 1 or 2, got {config.splits} and {config.share}"
    return None


def _config(p: _Problem, block_n: int, share: int = 1, persistent: bool = True) -> Config:
    """With as many splits as fill the processors once, were all tokens of one sequence."""
    tiles = p.tiles(p.tokens, share) * share * p.kv_heads
    splits = min(_PROCESSORS // max(tiles, 1), p.keys // (_LEAST * block_n), _MOST_SPLITS)
    return Config(block_n, fitting(_ROWS, block_n, columns(p.size)), max(splits, 1), share, persistent)


def _default(p: _Problem) -> Config:
    """Blocks that go on pass over the tiles that short chunks do not have: to start one for each would take longer."""
    return _config(p, _KEYS[columns(p.size)][0])


def _configs(p: _Problem) -> list[Config]:
    forms = ((1, True), (1, False), (2, True), (2, False))
    found = [_config(p, keys, *form) for keys in _KEYS[columns(p.size)] for form in forms]
    return [c for c in dict.fromkeys((_default(p), *found)) if _refusal(p, c) is None]


def _estimate(p: _Problem, config: Config) -> Work:
    splits = p.splits(config)
    keys = ceil_div(p.keys, splits)
    moved = (keys + _ROWS) * 2 * p.size * p.q.dtype.itemsize
    return Work(p.blocks(config.share) * splits, 4 * _ROWS * keys * columns(p.size), moved)


# Launches


_Sizes = tuple[int, ...]


def _views(q: _Sizes, q_strides: _Sizes, k: _Sizes, k_strides: _Sizes) -> tuple[tuple[_Sizes, _Sizes], ...]:
    """q as [tokens, kv heads, heads that share one, values], a cache as [pages, kv heads, tokens, values].

    Sizes, innermost first, and the strides of all but the values.
    """
    (tokens, heads, size), (pages, page, kv_heads, _) = q, k
    group, head = heads // kv_heads, q_strides[1]
    rows = (size, group, kv_heads, tokens), (head, head * group, q_strides[0])
    return rows, ((size, page, kv_heads, pages), (k_strides[1], k_strides[2], k_strides[0]))


@functools.cache
def _kernel(dtype: torch.dtype, size: int, config: Config) -> cuda_glue.Kernel:
    how = hopper_attention.Config(_ROWS, config.block_n, config.stages)
    sizes = f"{size}, {config.block_n}, {config.stages}, {config.share}"
    name, shared = f"chunked_attention<{cuda_glue.TYPES[dtype]}, {sizes}>", how.shared(columns(size))
    return cuda_glue.Kernel(_SOURCE, name, "TTTPPPPPPqiiiiiiiiiif", how.threads, shared, config.share, early=True)


@functools.cache
def _combination(dtype: torch.dtype, size: int) -> cuda_glue.Kernel:
    name = f"combine_splits<{cuda_glue.TYPES[dtype]}, {size}>"
    return cuda_glue.Kernel(_SOURCE, name, "PPPii", _ROWS, early=True)


@functools.lru_cache(maxsize=_KEPT)
def _maps(addresses: _Sizes, q: _Sizes, q_strides: _Sizes, k: _Sizes, k_strides: _Sizes, config: Config) -> list[Any]:
    """Of q, k_cache and v_cache: found at once, which takes less than to find each."""
    rows, cache = _views(q, q_strides, k, k_strides)
    group, part = rows[0][1], config.block_n // config.share
    height = min(k[1], part & -part)  # boxes must not pass the end of a page
    views = (*rows, group, 1, _ROWS // group), (*cache, height), (*cache, height)
    return [tensor_maps.heads_at(at, 2, *view) for at, view in zip(addresses, views)]


def _run(p: _Problem, config: Config, parts: Any = None, stats: Any = None) -> None:
    if p.bound == 0 or p.pages == 0:  # there is no map of nothing
        p.out.zero_()
        return
    q, k, out = p.q, p.k, p.out.data_ptr()
    addresses = q.data_ptr(), k.data_ptr(), p.v.data_ptr()
    maps = _maps(addresses, q.shape, q.stride(), k.shape, k.stride(), config)
    splits, kept = (1, (0, 0)) if parts is None else (parts.shape[0], (parts.data_ptr(), stats.data_ptr()))
    kernel, blocks = _kernel(q.dtype, p.size, config), p.blocks(config.share) * splits
    if config.persistent:
        blocks = min(blocks, kernel.resident() // config.share * config.share)
    pointers = p.table.data_ptr(), p.starts.data_ptr(), p.lengths.data_ptr(), out, *kept
    shapes = p.sequences, p.tokens, p.kv_heads, p.group, p.tiles(p.most, config.share)
    cuts = splits, config.splits if splits > 1 else 1
    left = min(p.window, _FAR) - 1 if p.window else _FAR
    rest = p.table.stride(0), *shapes, *cuts, p.page, p.bound, left, float(p.scale)
    kernel.launch(blocks, *maps, *pointers, *rest)
    if parts is not None:
        rows = p.tokens * p.heads
        _combination(q.dtype, p.size).launch(ceil_div(rows, _ROWS // 32), *kept, out, rows, splits)


def _compile(p: _Problem, config: Config, arch: str) -> Artifact:
    if p.splits(config) > 1:
        _combination(p.q.dtype, p.size).compile(arch)
    return _kernel(p.q.dtype, p.size, config).compile(arch)


refusal, default, configs, estimate, compile, run = functions(
    _of, _of_run, _refusal, _default, _configs, _estimate, _compile, _run
)


def workspace(*specs: Any, config: Config) -> tuple[TensorSpec, ...]:
    """What each split found: sums [splits, T, H, D], and tops and totals [2, splits, T, H]."""
    p = _of(specs)
    splits = p.splits(config)
    if splits == 1:
        return ()
    shapes = (splits, p.tokens, p.heads, p.size), (2, splits, p.tokens, p.heads)
    return tuple(TensorSpec.contiguous(shape, torch.float32, p.q.device) for shape in shapes)
