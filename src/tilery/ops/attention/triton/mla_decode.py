"""mla_decode in Triton: a program takes some heads of one sequence and a split of its keys; then splits are combined.

A tile of the cache is read once and serves as keys and, but for its turned part, as values. How a sequence is split
depends on its own length alone, so neither the batch nor the table's width changes a bit.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import triton
import triton.language as tl

from tilery.base.integers import ceil_div
from tilery.base.launch import Launch
from tilery.base.spec import TensorSpec, Work
from tilery.core.kernel import Kernel
from tilery.hardware.gpu import ARCHS, HOPPER, gpu
from tilery.languages.triton_glue import pdl_launch_dependents, pdl_wait
from tilery.ops.attention.call import MlaDecodeCall
from tilery.ops.attention.triton import softmax
from tilery.ops.attention.triton.softmax import (
    LOG2E,
    finish_softmax,
    page_of,
    page_offsets,
    split_keys,
    store_partial,
)

# Columns of the latent that a cache may have which Triton cannot load by 16 bytes. Tiles of more come through registers
# that are not there: 512 columns of fp16 in rows of 584 spilled 1.2 KB a thread, and were wrong on an H200.
_NARROW_LATENT = 128


class Queries(NamedTuple):
    ptr: Any
    sequence: int  # strides
    token: int
    head: int


class Cache(NamedTuple):
    ptr: Any
    page: int  # strides
    token: int


class Sequences(NamedTuple):
    lengths_ptr: Any
    table_ptr: Any
    table_row: int  # stride


class Results(NamedTuple):
    """Where rows are written: out and lse, or the results of splits."""

    out_ptr: Any
    lse_ptr: Any
    partial_out_ptr: Any
    partial_stats_ptr: Any


@triton.jit
def _along(x, AXIS: tl.constexpr):
    """x as a row or column of a tile, along that axis of it."""
    return x[:, None] if AXIS == 0 else x[None, :]


@triton.jit
def _scores(rows, keys, acc, SWAP_AB: tl.constexpr):
    """acc + rows · keysᵀ, or its transpose."""
    if SWAP_AB:
        acc = tl.dot(keys, tl.trans(rows), acc, input_precision="ieee")
    else:
        acc = tl.dot(rows, tl.trans(keys), acc, input_precision="ieee")
    return acc


@triton.jit
def _deep_scores(q, at, acc, inside, there, LATENT: tl.constexpr, DEPTH: tl.constexpr, SWAP_AB: tl.constexpr):
    """The same of what lies at q and `at`, DEPTH columns at a time: without tensor cores registers hold them all."""
    for first in range(0, LATENT, DEPTH):
        column = first + tl.arange(0, DEPTH)[None, :]
        rows = tl.load(q + column, mask=inside, other=0.0)
        acc = _scores(rows, tl.load(at + column, mask=there, other=0.0), acc, SWAP_AB)
    return acc


@triton.jit
def _add_values(acc, p, keys, SWAP_AB: tl.constexpr):
    """acc + P · keys, or its transpose."""
    if SWAP_AB:
        acc = tl.dot(tl.trans(keys), p.to(keys.dtype), acc, input_precision="ieee")
    else:
        acc = tl.dot(p.to(keys.dtype), keys, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=("sequences", "splits", "pages", "max_keys"))
def _mla_decode(
    q, q_rope, cache, sequence, results, scale, sequences, splits, pages, max_keys,
    QUERIES: tl.constexpr, HEADS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SWAP_AB: tl.constexpr, CHUNK: tl.constexpr, SPLITS: tl.constexpr,
    DEPTH: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    ROW: tl.constexpr = 1 if SWAP_AB else 0  # the axis of rows in a tile of scores, and of keys
    KEY: tl.constexpr = 1 - ROW
    AHEAD: tl.constexpr = PAGE >= KEYS  # a tile's page is asked for a turn before; of several a stage takes care
    blocks = tl.cdiv(QUERIES * HEADS, ROWS)  # neighbours take the same keys, from L2
    b, split = tl.program_id(0) // (blocks * splits), tl.program_id(0) // blocks % splits
    pdl_wait()
    pdl_launch_dependents()
    length = tl.load(sequence.lengths_ptr + b)
    valid = (length >= 0) & (length <= max_keys)
    length = tl.where(valid, length, 0)
    _, size = split_keys(length, QUERIES, 0, SPLITS, CHUNK, 1, False)
    first, last = split * size, tl.minimum(split * size + size, length)
    if (first >= length) & (split > 0):  # the first split of an empty sequence has nothing to say, and says it
        return

    b = b.to(tl.int64)
    row = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    inside = row < QUERIES * HEADS
    token = row // HEADS
    far_token, far_head = token.to(tl.int64), (row % HEADS).to(tl.int64)  # times a stride they may pass 2**31
    q_ptr = (q.ptr + b * q.sequence + far_token * q.token + far_head * q.head)[:, None]
    q_rope_ptr = (q_rope.ptr + b * q_rope.sequence + far_token * q_rope.token + far_head * q_rope.head)[:, None]
    latent, rope = tl.arange(0, LATENT), tl.arange(0, ROPE)
    rope_q = tl.load(q_rope_ptr + rope[None, :], mask=inside[:, None], other=0.0)
    if DEPTH == LATENT:
        latent_q = tl.load(q_ptr + latent[None, :], mask=inside[:, None], other=0.0)
    table_ptr = sequence.table_ptr
    if table_ptr is not None:
        table_ptr += b * sequence.table_row
    end = _along(length - QUERIES + 1 + token, ROW)  # a token sees itself and what was before

    row_max = tl.full((ROWS,), -float("inf"), tl.float32)
    row_sum = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((LATENT, ROWS) if SWAP_AB else (ROWS, LATENT), tl.float32)
    # The first key whose page is not there, one number or of each key of a tile.
    first_missing = tl.full((KEYS,) if PAGE > 0 and PAGE < KEYS else (), 2**31 - 1, tl.int32)
    page = page_of(table_ptr, b, first, last, PAGE, KEYS)
    for start in range(first, last, KEYS):
        key = start + tl.arange(0, KEYS)
        here = key < last
        if not AHEAD:
            page = page_of(table_ptr, b, start, last, PAGE, KEYS)
        if PAGE > 0:
            missing = (page < 0) | (page >= pages)
            page, here = tl.where(missing, 0, page), here & (missing == 0)
            first_missing = tl.where(missing, tl.minimum(first_missing, key if PAGE < KEYS else start), first_missing)
        there = here[:, None]
        base, each = page_offsets(page, start, cache.page, cache.token, PAGE, KEYS, FAR)
        if AHEAD:
            page = page_of(table_ptr, b, start + KEYS, last, PAGE, KEYS)
        at = (cache.ptr + base + each)[:, None]
        keys = tl.load(at + latent[None, :], mask=there, other=0.0)
        rope_keys = tl.load(at + LATENT + rope[None, :], mask=there, other=0.0)
        scores = tl.zeros((KEYS, ROWS) if SWAP_AB else (ROWS, KEYS), tl.float32)
        if DEPTH == LATENT:
            scores = _scores(latent_q, keys, scores, SWAP_AB)
        else:
            scores = _deep_scores(q_ptr, at, scores, inside[:, None], there, LATENT, DEPTH, SWAP_AB)
        scores = _scores(rope_q, rope_keys, scores, SWAP_AB) * (scale * LOG2E)
        scores = tl.where(_along(key, KEY) < end, scores, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(scores, KEY))
        finite = tl.where(new_max == -float("inf"), 0.0, new_max)  # a row that sees nothing yet
        p = tl.exp2(scores - _along(finite, ROW))
        rescale = tl.exp2(row_max - finite)
        row_sum, row_max = row_sum * rescale + tl.sum(p, KEY), new_max
        acc = _add_values(acc * _along(rescale, ROW), p, keys, SWAP_AB)

    out = tl.trans(acc) if SWAP_AB else acc
    # Counted anew, in other numbers: what was counted before the loop would be kept in registers through it.
    rows = b * (QUERIES * HEADS) + tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    inside = rows < (b + 1) * (QUERIES * HEADS)
    if PAGE > 0:
        first_missing = tl.min(first_missing, 0) if PAGE < KEYS else first_missing
        position = length - QUERIES + (rows // HEADS - b * QUERIES)
        row_sum = tl.where(position >= first_missing, float("nan"), row_sum)
    if results.partial_out_ptr is not None:
        all_rows = sequences.to(tl.int64) * (QUERIES * HEADS)
        store_partial(
            results.partial_out_ptr, results.partial_stats_ptr, out, row_max, row_sum, rows, split, inside, all_rows,
            splits, LATENT, LATENT,
        )  # fmt: skip
    else:
        inverse, lse = finish_softmax(row_max, tl.where(valid, row_sum, float("nan")))
        out_at = results.out_ptr + rows[:, None] * LATENT + latent[None, :]
        tl.store(out_at, out * inverse[:, None], mask=inside[:, None])
        head, token = rows % HEADS, rows // HEADS - b * QUERIES
        tl.store(results.lse_ptr + (b * HEADS + head) * QUERIES + token, lse, mask=inside)


def _is_narrow(cache: TensorSpec) -> bool:
    return not cache.aligned or any(step % 16 for step in cache.strides[:2])


@dataclass(frozen=True)
class Config:
    rows: int  # heads of all queries that a program takes
    keys: int  # of a tile
    swap_ab: bool  # keys times queries: few rows then fill the narrow side of the tensor cores
    chunk: int  # a split has a multiple of so many keys
    splits: int  # of a sequence, at most
    num_warps: int
    num_stages: int

    old_names: ClassVar[dict[str, str]] = {"swapped": "swap_ab"}  # in files of tuned configs


class MlaDecode(Kernel):
    archs = ARCHS
    Config = Config

    def refusal(self, call: MlaDecodeCall, config: Config | None = None) -> str | None:
        if call.q.dtype != torch.float32 and call.latent_dim > _NARROW_LATENT and _is_narrow(call.cache):
            return (
                f"takes more than {_NARROW_LATENT} columns of the latent from a cache that begins at a multiple of 16 "
                f"bytes and whose strides are multiples of 16, got {call.cache}"
            )
        if config is None:
            return None
        if config.chunk % config.keys:
            return f"chunk must be a multiple of keys, got {config}"
        limit = gpu(call.q.device).shared_per_block
        if (need := self._shared(call, config)) > limit:
            return f"{config} needs {need} bytes of shared memory, a block has {limit}"
        return None

    def _shared(self, call: MlaDecodeCall, config: Config) -> int:
        """Queries, tiles of the cache, and P on its way from one product to the other."""
        tiles = min(config.num_stages, 2) if call.page else config.num_stages  # the third is for the table
        p = config.rows * config.keys if config.swap_ab else 0
        width = call.latent_dim + call.rope_dim
        return ((config.rows + tiles * config.keys) * width + p) * call.q.dtype.itemsize

    def default(self, call: MlaDecodeCall) -> Config:
        """Many heads are bound by products and take long splits, as these leave much to combine; few by memory."""
        rows, device = call.rows, gpu(call.q.device)
        if call.q.dtype == torch.float32:
            return Config(16, 16, True, 256, 64, num_warps=8, num_stages=1)
        if device.number != HOPPER:  # wgmma takes 64 keys at a time
            small = rows <= 16 or device.shared_per_block < 160 * 1024
            return Config(16 if small else 32, 32, True, 256, 64, num_warps=4 if small else 8, num_stages=2)
        stages = 3 if 0 < call.page < 64 else 2
        if rows <= 16:
            return Config(16, 64, True, 256, 64, num_warps=4, num_stages=stages)
        if rows <= 32:
            return Config(32, 64, True, 256, 64, num_warps=8, num_stages=stages)
        return Config(64, 64, False, 512 if rows <= 64 else 1024, 32, num_warps=8, num_stages=stages)

    def configs(self, call: MlaDecodeCall) -> list[Config]:
        tiles = ((16, 64, True, 4), (16, 64, True, 8), (32, 64, True, 8), (64, 64, False, 8), (16, 32, True, 4))
        found = [self.default(call)]
        if call.q.dtype != torch.float32:  # other tiles of fp32 would not fit in registers
            stages = 3 if 0 < call.page < 64 else 2
            found += [
                Config(rows, keys, swap_ab, chunk, 32 if rows == 64 else 64, warps, stages)
                for rows, keys, swap_ab, warps in tiles
                for chunk in (256, 512, 1024, 2048)
            ]
        return [c for c in dict.fromkeys(found) if self.refusal(call, c) is None]

    def workspace(self, call: MlaDecodeCall, config: Config) -> dict[str, TensorSpec]:
        return softmax.workspace(call, self._splits(call, config))

    def _splits(self, call: MlaDecodeCall, config: Config) -> int:
        return max(min(config.splits, ceil_div(call.max_keys, config.chunk)), 1)

    def estimate(self, call: MlaDecodeCall, config: Config) -> Work:
        blocks, splits = ceil_div(call.rows, config.rows), self._splits(call, config)
        keys, width = ceil_div(call.max_keys, splits), call.latent_dim + call.rope_dim
        nbytes = (keys + config.rows) * width * call.q.dtype.itemsize
        nbytes += 8 * config.rows * call.latent_dim if splits > 1 else 0
        return Work(call.batch * blocks * splits, 2 * config.rows * keys * (width + call.latent_dim), nbytes)

    def launches(self, call: MlaDecodeCall, config: Config) -> list[Launch]:
        splits = self._splits(call, config)
        partials = (call.partial_out, call.partial_stats) if splits > 1 else (None, None)
        args = {
            "q": Queries(call.q, *call.q.strides[:3]), "q_rope": Queries(call.q_rope, *call.q_rope.strides[:3]),
            "cache": Cache(call.cache, *call.cache.strides[:2]),
            "sequence": Sequences(call.lengths, call.block_table, call.table_stride),
            "results": Results(call.out, call.lse, *partials), "scale": call.softmax_scale,
            "sequences": call.batch, "splits": splits, "pages": call.cache.shape[0], "max_keys": call.max_keys,
        }  # fmt: skip
        constants = {
            "QUERIES": call.queries, "HEADS": call.heads, "LATENT": call.latent_dim, "ROPE": call.rope_dim,
            "PAGE": call.page, "ROWS": config.rows, "KEYS": config.keys, "SWAP_AB": config.swap_ab,
            "CHUNK": config.chunk, "SPLITS": config.splits,
            "DEPTH": min(call.latent_dim, 32) if call.q.dtype == torch.float32 else call.latent_dim,
            "FAR": call.cache.stride(1) >= 2**23,  # offsets inside of a tile may pass 2**31 elements
        }  # fmt: skip
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        grid = call.batch * splits * ceil_div(call.rows, config.rows)
        found = [Launch(_mla_decode, grid, args, constants, options, pdl=True)]
        if splits > 1:
            found.append(softmax.combine(call, config.splits, config.chunk, 1, lse=call.lse))
        return found


mla_decode = MlaDecode()
