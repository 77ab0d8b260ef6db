"""A program takes some heads of one sequence and a split of its keys; a second launch combines the splits.

A tile of the cache is read once and serves as keys and, but for its turned part, as values. How a sequence is cut
depends on its own length alone, so neither the batch nor the table's width changes a bit.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from tilery.base.spec import Artifact, TensorSpec, Work
from tilery.hardware import device
from tilery.hardware.device import ARCHS
from tilery.languages import triton_glue
from tilery.languages.triton_glue import hand_over, take_over
from tilery.ops.mla_decode import Sizes, outputs, sizes
from tilery.parts import triton_paged
from tilery.parts.triton_attention import LOG2E, finish
from tilery.parts.triton_paged import cut, keep, offsets, page_of
from tilery.parts.triton_tiles import far

archs = ARCHS


@dataclass(frozen=True)
class Config:
    rows: int  # heads of all queries that a program takes
    keys: int  # of a tile
    swapped: bool  # keys times queries: few rows then fill the narrow side of the tensor cores
    chunk: int  # a split has a multiple of so many keys
    splits: int  # of a sequence, at most
    num_warps: int
    num_stages: int


def refusal(
    q: TensorSpec, q_rope: TensorSpec, cache: TensorSpec, lengths: TensorSpec, block_table: TensorSpec | None,
    config: Config | None = None,
) -> str | None:  # fmt: skip
    if config is None:
        return None
    if config.chunk % config.keys:
        return f"chunk must be a multiple of keys, got {config}"
    need = _shared(config, sizes(q, q_rope, cache, block_table), q.dtype)
    limit = device.shared_limit(device.arch(q.device))
    if need > limit:
        return f"{config} needs {need} bytes of shared memory, a block has {limit}"
    return None


def _shared(config: Config, s: Sizes, dtype: torch.dtype) -> int:
    """Queries, tiles of the cache, and weights on their way from one product to the other."""
    tiles = min(config.num_stages, 2) if s.block else config.num_stages  # the third is for the table
    weights = config.rows * config.keys if config.swapped else 0
    return ((config.rows + tiles * config.keys) * (s.latent + s.rope) + weights) * dtype.itemsize


def default(
    q: TensorSpec, q_rope: TensorSpec, cache: TensorSpec, lengths: TensorSpec, block_table: TensorSpec | None
) -> Config:
    """Many heads are bound by products and take long splits, as what these leave is dear; few are bound by memory."""
    s = sizes(q, q_rope, cache, block_table)
    rows, arch = s.queries * s.heads, device.arch(q.device)
    if q.dtype == torch.float32:
        return Config(16, 16, True, 256, 64, num_warps=8, num_stages=1)
    if arch != "sm_90":  # without wgmma, which takes 64 keys at a time
        small = rows <= 16 or device.shared_limit(arch) < 160 * 1024
        return Config(16 if small else 32, 32, True, 256, 64, num_warps=4 if small else 8, num_stages=2)
    stages = 3 if 0 < s.block < 64 else 2
    if rows <= 16:
        return Config(16, 64, True, 256, 64, num_warps=4, num_stages=stages)
    if rows <= 32:
        return Config(32, 64, True, 256, 64, num_warps=8, num_stages=stages)
    return Config(64, 64, False, 512 if rows <= 64 else 1024, 32, num_warps=8, num_stages=stages)


def configs(
    q: TensorSpec, q_rope: TensorSpec, cache: TensorSpec, lengths: TensorSpec, block_table: TensorSpec | None
) -> list[Config]:
    specs = q, q_rope, cache, lengths, block_table
    tiles = ((16, 64, True, 4), (16, 64, True, 8), (32, 64, True, 8), (64, 64, False, 8), (16, 32, True, 4))
    found = [default(*specs)]
    if q.dtype != torch.float32:  # tiles of the others would not fit in registers
        stages = 3 if block_table is not None and cache.shape[1] < 64 else 2
        found += [
            Config(rows, keys, swapped, chunk, 32 if rows == 64 else 64, warps, stages)
            for rows, keys, swapped, warps in tiles
            for chunk in (256, 512, 1024, 2048)
        ]
    return [c for c in dict.fromkeys(found) if refusal(*specs, config=c) is None]


def workspace(*specs: Any, config: Config) -> tuple[TensorSpec, ...]:
    q, q_rope, cache, _, block_table = specs
    s = sizes(q, q_rope, cache, block_table)
    return triton_paged.workspace(_splits(s, config), s.batch * s.queries, s.heads, s.latent, q.device)


def _splits(s: Sizes, config: Config) -> int:
    return max(min(config.splits, triton.cdiv(s.bound, config.chunk)), 1)


def estimate(*specs: Any, config: Config) -> Work:
    q, q_rope, cache, _, block_table = specs
    s = sizes(q, q_rope, cache, block_table)
    blocks, splits = triton.cdiv(s.queries * s.heads, config.rows), _splits(s, config)
    keys, width = triton.cdiv(s.bound, splits), s.latent + s.rope
    nbytes = (keys + config.rows) * width * q.dtype.itemsize + (8 * config.rows * s.latent if splits > 1 else 0)
    return Work(s.batch * blocks * splits, 2 * config.rows * keys * (width + s.latent), nbytes)


@triton.jit
def _beside(x, ALONG: tl.constexpr):
    """x to be held against a tile along that axis of it."""
    return x[:, None] if ALONG == 0 else x[None, :]


@triton.jit
def _product(rows, keys, acc, SWAPPED: tl.constexpr):
    """acc + rows · keysᵀ, or its transpose."""
    if SWAPPED:
        acc = tl.dot(keys, tl.trans(rows), acc, input_precision="ieee")
    else:
        acc = tl.dot(rows, tl.trans(keys), acc, input_precision="ieee")
    return acc


@triton.jit
def _deep_product(q, at, acc, inside, seen, LATENT: tl.constexpr, DEPTH: tl.constexpr, SWAPPED: tl.constexpr):
    """The same of what lies at q and `at`, DEPTH columns at a time: without tensor cores registers hold them all."""
    for first in range(0, LATENT, DEPTH):
        column = first + tl.arange(0, DEPTH)[None, :]
        rows = tl.load(q + column, mask=inside, other=0.0)
        acc = _product(rows, tl.load(at + column, mask=seen, other=0.0), acc, SWAPPED)
    return acc


@triton.jit
def _weighted(acc, weights, keys, SWAPPED: tl.constexpr):
    """acc + weights · keys, or its transpose."""
    if SWAPPED:
        acc = tl.dot(tl.trans(keys), weights.to(keys.dtype), acc, input_precision="ieee")
    else:
        acc = tl.dot(weights.to(keys.dtype), keys, acc, input_precision="ieee")
    return acc


@triton_glue.early
@triton.jit(do_not_specialize=("sequences", "splits", "pages", "bound"))
def _attend(
    q_ptr, q_rope_ptr, cache_ptr, lengths_ptr, table_ptr, out_ptr, lse_ptr, parts_ptr, stats_ptr,
    scale, sequences, splits, pages, bound,
    q_batch, q_token, q_head, r_batch, r_token, r_head, c_block, c_token, t_batch,
    QUERIES: tl.constexpr, HEADS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SWAPPED: tl.constexpr, CHUNK: tl.constexpr, SPLITS: tl.constexpr,
    DEPTH: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    ROW: tl.constexpr = 1 if SWAPPED else 0  # the axis of rows in a tile of scores, and of keys
    KEY: tl.constexpr = 1 - ROW
    AHEAD: tl.constexpr = PAGE >= KEYS  # a tile's page is asked for a turn before; of several a stage takes care
    blocks = tl.cdiv(QUERIES * HEADS, ROWS)  # neighbours take the same keys, from L2
    b, split = tl.program_id(0) // (blocks * splits), tl.program_id(0) // blocks % splits
    take_over()
    hand_over()
    length = tl.load(lengths_ptr + b)
    sound = (length >= 0) & (length <= bound)
    length = tl.where(sound, length, 0)
    _, size = cut(length, QUERIES, 0, SPLITS, CHUNK, 1, False)
    first, last = split * size, tl.minimum(split * size + size, length)
    if (first >= length) & (split > 0):  # the first split of an empty sequence has nothing to say, and says it
        return

    b = b.to(tl.int64)
    row = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    inside = row < QUERIES * HEADS
    token = row // HEADS
    far_token, far_head = token.to(tl.int64), (row % HEADS).to(tl.int64)  # times a stride they may pass 2**31
    q = (q_ptr + b * q_batch + far_token * q_token + far_head * q_head)[:, None]
    q_rope = (q_rope_ptr + b * r_batch + far_token * r_token + far_head * r_head)[:, None]
    latent, rope = tl.arange(0, LATENT), tl.arange(0, ROPE)
    rope_q = tl.load(q_rope + rope[None, :], mask=inside[:, None], other=0.0)
    if DEPTH == LATENT:
        latent_q = tl.load(q + latent[None, :], mask=inside[:, None], other=0.0)
    if table_ptr is not None:
        table_ptr += b * t_batch
    end = _beside(length - QUERIES + 1 + token, ROW)  # a token sees itself and what was before

    top = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((LATENT, ROWS) if SWAPPED else (ROWS, LATENT), tl.float32)
    # The first key whose page is not there, one number or of each key of a tile.
    wrong = tl.full((KEYS,) if PAGE > 0 and PAGE < KEYS else (), 2**31 - 1, tl.int32)
    page = page_of(table_ptr, b, first, last, PAGE, KEYS)
    for start in range(first, last, KEYS):
        key = start + tl.arange(0, KEYS)
        here = key < last
        if not AHEAD:
            page = page_of(table_ptr, b, start, last, PAGE, KEYS)
        if PAGE > 0:
            missing = (page < 0) | (page >= pages)
            page, here = tl.where(missing, 0, page), here & (missing == 0)
            wrong = tl.where(missing, tl.minimum(wrong, key if PAGE < KEYS else start), wrong)
        seen = here[:, None]
        base, each = offsets(page, start, c_block, c_token, PAGE, KEYS, FAR)
        if AHEAD:
            page = page_of(table_ptr, b, start + KEYS, last, PAGE, KEYS)
        at = (cache_ptr + base + each)[:, None]
        keys = tl.load(at + latent[None, :], mask=seen, other=0.0)
        rope_keys = tl.load(at + LATENT + rope[None, :], mask=seen, other=0.0)
        scores = tl.zeros((KEYS, ROWS) if SWAPPED else (ROWS, KEYS), tl.float32)
        if DEPTH == LATENT:
            scores = _product(latent_q, keys, scores, SWAPPED)
        else:
            scores = _deep_product(q, at, scores, inside[:, None], seen, LATENT, DEPTH, SWAPPED)
        scores = _product(rope_q, rope_keys, scores, SWAPPED) * (scale * LOG2E)
        scores = tl.where(_beside(key, KEY) < end, scores, -float("inf"))
        best = tl.maximum(top, tl.max(scores, KEY))
        safe = tl.where(best == -float("inf"), 0.0, best)  # a row that sees nothing yet
        weights = tl.exp2(scores - _beside(safe, ROW))
        shrink = tl.exp2(top - safe)
        total, top = total * shrink + tl.sum(weights, KEY), best
        acc = _weighted(acc * _beside(shrink, ROW), weights, keys, SWAPPED)

    found = tl.trans(acc) if SWAPPED else acc
    # Counted anew, in other numbers: what was counted before the loop would be kept in registers through it.
    rows = b * (QUERIES * HEADS) + tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    inside = rows < (b + 1) * (QUERIES * HEADS)
    if PAGE > 0:
        wrong = tl.min(wrong, 0) if PAGE < KEYS else wrong
        total = tl.where(length - QUERIES + (rows // HEADS - b * QUERIES) >= wrong, float("nan"), total)
    if parts_ptr is not None:
        all_rows = sequences.to(tl.int64) * (QUERIES * HEADS)
        keep(parts_ptr, stats_ptr, found, top, total, rows, split, inside, all_rows, splits, LATENT, LATENT)
    else:
        share, lse = finish(top, tl.where(sound, total, float("nan")))
        tl.store(out_ptr + rows[:, None] * LATENT + latent[None, :], found * share[:, None], mask=inside[:, None])
        head, token = rows % HEADS, rows // HEADS - b * QUERIES
        tl.store(lse_ptr + (b * HEADS + head) * QUERIES + token, lse, mask=inside)


def _launches(config: Config, outs, q, q_rope, cache, lengths, block_table, scale, parts=None, stats=None):
    """Kernel, grid, arguments, constants and options of each launch; of tensors for `run`, of specs for `compile`."""
    s = sizes(q, q_rope, cache, block_table)
    splits = _splits(s, config)
    strides = [x.stride(d) for x in (q, q_rope) for d in (0, 1, 2)] + [cache.stride(0), cache.stride(1)]
    table = 0 if block_table is None else block_table.stride(0)
    arguments = (
        q, q_rope, cache, lengths, block_table, *outs, parts, stats,
        float(scale), s.batch, splits, int(cache.shape[0]), s.bound, *strides, table,
    )  # fmt: skip
    constants = {
        "QUERIES": s.queries, "HEADS": s.heads, "LATENT": s.latent, "ROPE": s.rope, "PAGE": s.block,
        "ROWS": config.rows, "KEYS": config.keys, "SWAPPED": config.swapped, "CHUNK": config.chunk,
        "SPLITS": config.splits, "DEPTH": min(s.latent, 32) if q.dtype == torch.float32 else s.latent,
        "FAR": far(cache.stride(1)),
    }  # fmt: skip
    grid = (s.batch * splits * triton.cdiv(s.queries * s.heads, config.rows),)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    yield _attend, grid, arguments, constants, options
    if splits > 1:
        cuts = s.queries, s.bound, 0, config.splits, config.chunk, 1
        yield triton_paged.combination(parts, stats, lengths, None, None, *outs, *cuts)


def compile(specs, config: Config, arch: str) -> Artifact:
    launches = _launches(config, outputs(*specs), *specs, 0.1, *workspace(*specs, config=config))
    return triton_glue.greediest([triton_glue.legacy_compile(k, a, c, o, arch) for k, _, a, c, o in launches])


def run(outs, args, config: Config, *kept) -> None:
    for kernel, grid, arguments, constants, options in _launches(config, outs, *args, *kept):
        triton_glue.legacy_launch(kernel, grid, arguments, constants, options)
