"""Attention on the CPU: a core takes a block of queries and walks over the keys they see, with a running maximum.

One kernel serves the whole family. Where a cache is long its keys are cut into chunks, whose sums are joined in order:
neither the cut nor a sum depends on how many cores there are, or on the other sequences.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import prange

from tilery.base.spec import Artifact, TensorSpec
from tilery.languages import numba_elements, numba_glue
from tilery.languages.numba_elements import COLUMNS, DEPTH, FP32, ROWS, at, exp, f32, load, rank, store, unrank
from tilery.parts.numba_attention_blocks import (
    NOTHING,
    Room,
    add_values,
    find_block,
    load_queries,
    put_scores,
    weigh_row,
)
from tilery.parts.numba_attention_pieces import BLOCK, add_scaled, fill, padded
from tilery.parts.numba_attention_rows import clear, finish, spoil
from tilery.parts.numba_attention_tasks import Task, launchable, raised

archs = ("cpu",)

_CHUNK = 1024  # keys of a cache
_ROWS = 192  # of a block: its scores take 192 KiB of an L2 cache


@dataclass(frozen=True)
class Config:
    rows: int  # of a block
    chunk: int  # keys that a core takes before their sums are joined; 0: all
    parallel: bool


# Plans


def _refusal(p: Task, config: Config | None = None) -> str | None:
    if config is not None and (config.rows < 1 or config.rows % ROWS):
        return f"rows must be a multiple of the register tile's {ROWS}, got {config.rows}"
    if config is not None and (config.chunk < 0 or config.chunk % BLOCK):
        return f"chunk must be a multiple of {BLOCK}, got {config.chunk}"
    return numba_elements.refusal(p.tensors.q._replace(dtype=torch.float16))  # one kernel reads every dtype


def _default(p: Task, cached: bool) -> Config:
    """Of a cache the cut must not depend on how many sequences there are: each has the same bits alone."""
    sizes = p.sizes
    total = sizes.queries * sizes.per
    parallel = sizes.batch * sizes.groups * total * sizes.keys * (sizes.k + sizes.v) >= 2**19
    if cached:
        return Config(_rounded(total, _ROWS), _CHUNK if sizes.keys > _CHUNK else 0, parallel)
    rows, busy = _ROWS, 2 * numba_glue.threads(parallel)
    while rows > 4 * ROWS and sizes.batch * sizes.groups * -(-total // rows) < busy:
        rows //= 2
    return Config(_rounded(total, rows), 0, parallel)


def _configs(p: Task, cached: bool) -> list[Config]:
    total = p.sizes.queries * p.sizes.per
    sizes = dict.fromkeys(_rounded(total, rows) for rows in (4 * ROWS, 8 * ROWS, 16 * ROWS, 32 * ROWS))
    chunks = (0, _CHUNK, 4 * _CHUNK) if cached else (0,)
    return [Config(rows, chunk, parallel) for rows in sizes for chunk in chunks for parallel in (False, True)]


def _rounded(total: int, most: int) -> int:
    return -(-min(max(total, 1), most) // ROWS) * ROWS


def _chunks(p: Task, config: Config) -> int:
    return max(-(-p.sizes.keys // config.chunk), 1) if config.chunk else 1


def _workspace(p: Task, config: Config) -> tuple[TensorSpec, ...]:
    """For each thread its buffers; for each chunk of each row sums, maximum and total, if there are several."""
    sizes, where = p.sizes, p.tensors.q.device
    depth, width = sizes.k + sizes.k_rest, padded(sizes.v)
    pieces = -(-depth // DEPTH)
    floats = config.rows * (pieces * DEPTH + BLOCK + width + 2) + BLOCK * max(depth, width)
    floats += max(depth, sizes.v, BLOCK)
    chunks = _chunks(p, config)
    rows = sizes.batch * sizes.groups * chunks * sizes.queries * sizes.per if chunks > 1 else 0
    return (
        TensorSpec.contiguous((numba_glue.threads(config.parallel), -(-floats // 16) * 16), torch.float32, where),
        TensorSpec.contiguous((rows, sizes.v + 2), torch.float32, where),
    )


# The kernel


@numba_glue.jit
def _room(work, rows, p):
    depth, pitch = p.sizes.k + p.sizes.k_rest, (p.sizes.v + COLUMNS - 1) // COLUMNS * COLUMNS
    scores = at(work, (depth + DEPTH - 1) // DEPTH * DEPTH * rows, FP32)
    sums = at(scores, rows * BLOCK, FP32)
    tops = at(sums, rows * pitch, FP32)
    panels = at(tops, 2 * rows, FP32)
    line = at(panels, BLOCK * max(depth, pitch), FP32)
    return Room(work, scores, panels, sums, tops, at(tops, rows, FP32), line, rows, pitch)


@numba_glue.jit
def _walk(low, high, room, block, p):
    """Sums, maxima and totals of the block's rows over the keys from low to high."""
    fill(room.sums, (block.rows + ROWS - 1) // ROWS * ROWS * room.pitch, f32(0))
    fill(room.tops, block.rows, NOTHING)
    fill(room.totals, block.rows, f32(0))
    load_queries(room, block, p)
    first = low
    while first < high:
        count = min(first // BLOCK * BLOCK + BLOCK, high) - first
        put_scores(first, count, room, block, p)
        for r in range(block.rows):
            weigh_row(r, first, count, room, block, p)
        add_values(first, count, room, block, p)
        first += count


@numba_glue.jit
def _partial(partial, r, chunk, chunks, block, p):
    """Where a row's sums of a chunk lie."""
    total = p.sizes.queries * p.sizes.per
    row = ((block.sequence * p.sizes.groups + block.group) * chunks + chunk) * total + block.row + r
    return at(partial, row * (p.sizes.v + 2), FP32)


@numba_glue.jit
def _keep(partial, chunk, chunks, room, block, p):
    for r in range(block.rows):
        kept = _partial(partial, r, chunk, chunks, block, p)
        fill(kept, p.sizes.v, f32(0))
        add_scaled(kept, at(room.sums, r * room.pitch, FP32), p.sizes.v, f32(1))
        store(kept, p.sizes.v, load(room.tops, r, FP32), FP32)
        store(kept, p.sizes.v + 1, load(room.totals, r, FP32), FP32)


@numba_glue.jit
def _join(partial, chunk, chunks, room, block, p):
    """Joins what the chunks kept, first to last."""
    first, last = block.low // chunk, (block.high + chunk - 1) // chunk
    for r in range(block.rows):
        top, total = NOTHING, f32(0)
        for c in range(first, last):
            top = unrank(max(rank(top), rank(load(_partial(partial, r, c, chunks, block, p), p.sizes.v, FP32))))
        base = f32(0) if top == NOTHING else top
        fill(room.sums, p.sizes.v, f32(0))
        for c in range(first, last):
            kept = _partial(partial, r, c, chunks, block, p)
            weight = exp(load(kept, p.sizes.v, FP32) - base)
            total += weight * load(kept, p.sizes.v + 1, FP32)
            add_scaled(room.sums, kept, p.sizes.v, weight)
        finish(r, room.sums, top, total, block, p)


@numba_glue.jit
def _unit(unit, join, partial, rows, chunk, chunks, room, p):
    """A block of queries against a chunk of keys, or what joins its chunks; later queries, which see more, first."""
    blocks, pairs = (p.sizes.queries * p.sizes.per + rows - 1) // rows, p.sizes.batch * p.sizes.groups
    c, unit = (0, unit) if join else (unit % chunks, unit // chunks)
    pair, row = unit % pairs, (blocks - 1 - unit // pairs) * rows
    block = find_block(pair // p.sizes.groups, pair % p.sizes.groups, row, rows, p)
    if not block.sound:
        if join or chunks == 1:
            spoil(blocks * rows, block, room, p)
        return
    if join:
        _join(partial, chunk, chunks, room, block, p)
        return
    low, high = block.low, block.high
    if chunks > 1:
        low, high = max(low, c * chunk), min(high, (c + 1) * chunk)
        if low >= high:
            return
    if block.rows:
        _walk(low, high, room, block, p)
    if chunks > 1:
        _keep(partial, c, chunks, room, block, p)
    else:
        for r in range(block.rows):
            sums = at(room.sums, r * room.pitch, FP32)
            finish(r, sums, load(room.tops, r, FP32), load(room.totals, r, FP32), block, p)


@numba_glue.jit
def _part(first, step, join, work, partial, rows, chunk, chunks, tensors, flat, sizes, rules, kinds):
    """Every `step`-th unit, in buffers of its own."""
    p = Task(tensors, raised(flat), sizes, rules, kinds)
    room = _room(work, rows, p)
    units = (sizes.queries * sizes.per + rows - 1) // rows * sizes.batch * sizes.groups
    for unit in range(first, units if join else units * chunks, step):
        _unit(unit, join, partial, rows, chunk, chunks, room, p)
    if sizes.packed and not join:
        clear(first, step, room, p)


@numba_glue.kernel
def _attention(
    threads, work, partial, size, rows, chunk, chunks, tensors, strides, sizes, rules, kinds, dtype
):  # fmt: skip
    for join in range(2 if chunks > 1 else 1):
        if threads > 1:
            for i in prange(threads):
                thread = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
                own = at(work, thread * size, FP32)
                _part(thread, threads, join, own, partial, rows, chunk, chunks, tensors, strides, sizes, rules, kinds)
        else:
            one = threads - 1  # not a literal: for that all would be compiled once more
            _part(one, threads, join, work, partial, rows, chunk, chunks, tensors, strides, sizes, rules, kinds)


def _arguments(p: Task, config: Config, work: Any, partial: Any) -> tuple[Any, ...]:
    """The launch arguments, of tensors for a launch and of specs for a compile."""
    cut = config.rows, config.chunk, _chunks(p, config)
    return (work, partial), work.shape[1], *cut, *launchable(p)


_made: list[Artifact] = []  # one serves all ops and specs: they differ in numbers alone


def kernel(
    task: Callable[..., Task], of_run: Callable[..., Task], outputs: Callable[..., Any], cached: bool = False
) -> Any:
    """An op's refusal, default, configs, workspace, compile and run; `task(outs, specs)` is what it computes.

    `cached`: queries are few and keys many, and the cut must be the same in any batch.
    """

    def planned(*specs: Any) -> Task:
        return task(outputs(*specs), specs)

    def compile(specs: Any, config: Config, arch: str) -> Artifact:
        if not _made:
            p = planned(*specs)
            _made.append(numba_glue.legacy_compile(_attention, *_arguments(p, config, *_workspace(p, config))))
        return _made[0]

    def run(outs: Any, args: Any, config: Config, work: Any, partial: Any) -> None:
        numba_glue.legacy_launch(_attention, config.parallel, *_arguments(of_run(outs, args), config, work, partial))

    return (
        lambda *specs, config=None: _refusal(planned(*specs), config),
        lambda *specs: _default(planned(*specs), cached),
        lambda *specs: _configs(planned(*specs), cached),
        lambda *specs, config: _workspace(planned(*specs), config),
        compile,
        run,
    )
