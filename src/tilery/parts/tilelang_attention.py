"""Few queries against a KV cache in TileLang: keys are cut among blocks (split KV), a second launch combines.

How a sequence is cut depends on its own length and the config alone, never on the batch: it gives the same bits in any.
What a split found of a row is its running softmax (top, total) in base 2 and the sum of its weighted values, all fp32:
parts [splits, B, Q, H, D] and stats [2, splits, B, Q, H].
"""
# TileLang's annotations are calls:
# mypy: ignore-errors

from typing import Any, NamedTuple

import tilelang.language as T

from tilery.parts.fp8 import ceil_div

_LOG2E = 1.4426950408889634
_COMBINING = 64  # threads that combine a row
# Copies as they are, waited for where the loop says: T.Pipelined builds no loop whose length only the device knows.
_ASYNC = {"parallel_prefer_async": True, "parallel_async_without_async_commit_wait": True}


class Problem(NamedTuple):
    """What a kernel is built for; batch, keys and strides are its arguments."""

    queries: int
    heads: int
    kv_heads: int
    size: int
    page: int  # tokens of a block of the cache; 0: a sequence is in one piece
    dtype: str
    even: bool  # rows of q and of the caches start on 16 bytes


def decode(problem: Problem, config: Any):
    queries, heads, kv_heads, size, page, dtype, even = problem
    group = heads // kv_heads
    bm, bn, stages = config.block_m, config.block_n, config.stages
    rows, tiles = queries * group, ceil_div(queries * group, bm)
    batch, splits, most = T.dynamic("batch"), T.dynamic("splits"), T.dynamic("most")
    blocks, keys = (T.dynamic("blocks"), page) if page else (batch, T.dynamic("keys"))
    bound = most * page if page else keys
    q_steps = tuple(T.dynamic(f"q_step{d}", "int64") for d in range(3))
    steps = tuple(T.dynamic(f"step{d}", "int64") for d in range(3))
    table_steps = tuple(T.dynamic(f"table_step{d}", "int64") for d in range(2))
    wide = ceil_div(size, _COMBINING) * _COMBINING
    inf, nan = T.infinity("float32"), T.float32(float("nan"))

    @T.macro
    def cut(lengths, b, length, share):
        """Keys of the sequence, and how many of them a split has: a multiple of block_n."""
        length[0] = T.min(T.max(lengths[b], 0), bound)
        share[0] = T.max(T.ceildiv(length[0], config.splits * bn), 1) * bn

    @T.macro
    def fetch(cache, ring, table, b, g, start, end, slot):
        """Asks for a tile of keys or values; nothing from token `end` on is read, and zeros stand for it.

        The same is true of a block that the cache does not have: TileLang checks indices that it cannot bound itself.
        """
        for n, d in T.Parallel(bn, size, annotations=_ASYNC if even else {}):
            if page:  # the table is looked at before it is known whether the key is there
                known = T.max(T.min(start + n, end - 1), 0)
                ring[slot, n, d] = T.if_then_else(
                    start + n < end, cache[table[b, known // page], (start + n) % page, g, d], 0
                )
            else:
                ring[slot, n, d] = T.if_then_else(start + n < end, cache[b, start + n, g, d], 0)

    @T.macro
    def look(table, b, start, end, missing):
        """The first key from `start` on, of a tile, whose block the cache does not have, if it is before `missing`."""
        for i in T.unroll(max(bn // page, 1)):
            key = start + i * page
            block = table[b, T.min(key, end - 1) // page]
            if (key < end) & ((block < 0) | (block >= blocks)):
                missing[0] = T.min(missing[0], key)

    @T.macro
    def attend(q, k_cache, v_cache, lengths, table, parts, stats, scale, x, split, b):
        if even:  # what makes 16-byte copies of the loads below
            for stride in (*q_steps, *steps):
                T.assume(stride % 8 == 0)
        g, first_row = x % kv_heads, x // kv_heads * bm
        q_tile = T.alloc_shared((bm, size), dtype)
        k_ring = T.alloc_shared((stages, bn, size), dtype)
        v_ring = T.alloc_shared((stages, bn, size), dtype)
        scores = T.alloc_fragment((bm, bn), "float32")
        weights = T.alloc_fragment((bm, bn), dtype)
        acc = T.alloc_fragment((bm, size), "float32")
        top = T.alloc_fragment((bm,), "float32")
        before = T.alloc_fragment((bm,), "float32")
        safe = T.alloc_fragment((bm,), "float32")
        shrink = T.alloc_fragment((bm,), "float32")
        total = T.alloc_fragment((bm,), "float32")
        added = T.alloc_fragment((bm,), "float32")
        length = T.alloc_local((1,), "int32")
        share = T.alloc_local((1,), "int32")
        missing = T.alloc_local((1,), "int32")  # the first key whose block the cache does not have
        missing[0] = T.max_value("int32")
        cut(lengths, b, length, share)
        low = split * share[0]
        end = T.min(low + share[0], length[0])
        for ahead in T.unroll(stages - 1):
            fetch(k_cache, k_ring, table, b, g, low + ahead * bn, end, ahead)
            fetch(v_cache, v_ring, table, b, g, low + ahead * bn, end, ahead)
            T.ptx_commit_group()
        for r, d in T.Parallel(bm, size):
            row = first_row + r
            q_tile[r, d] = T.if_then_else(row < rows, q[b, row // group, g * group + row % group, d], 0)
        T.clear(acc)
        T.clear(total)
        T.fill(top, -inf)
        for step in T.serial(T.ceildiv(T.max(end - low, 0), bn)):
            start = low + step * bn
            T.ptx_wait_group(stages - 2)
            T.sync_threads()  # this tile is there for all, and the one before is no longer read
            fetch(k_cache, k_ring, table, b, g, start + (stages - 1) * bn, end, (step + stages - 1) % stages)
            fetch(v_cache, v_ring, table, b, g, start + (stages - 1) * bn, end, (step + stages - 1) % stages)
            T.ptx_commit_group()
            if page:
                look(table, b, start, end, missing)
            T.gemm(
                q_tile, k_ring[step % stages, :, :], scores, transpose_B=True, policy=T.GemmWarpPolicy.FullRow,
                clear_accum=True,
            )  # fmt: skip
            for r, n in T.Parallel(bm, bn):
                place = length[0] - queries + (first_row + r) // group
                seen = (start + n < end) & (start + n <= place)
                scores[r, n] = T.if_then_else(seen, scores[r, n] * (scale * _LOG2E), -inf)
            T.copy(top, before)
            T.reduce_max(scores, top, dim=1, clear=False)
            for r in T.Parallel(bm):
                safe[r] = T.if_then_else(top[r] == -inf, 0.0, top[r])  # a row that sees nothing yet
                shrink[r] = T.exp2(before[r] - safe[r])
            for r, n in T.Parallel(bm, bn):
                scores[r, n] = T.exp2(scores[r, n] - safe[r])
            T.reduce_sum(scores, added, dim=1)
            for r in T.Parallel(bm):
                total[r] = total[r] * shrink[r] + added[r]
            T.copy(scores, weights)
            for r, d in T.Parallel(bm, size):
                acc[r, d] *= shrink[r]
            T.gemm(weights, v_ring[step % stages, :, :], acc, policy=T.GemmWarpPolicy.FullRow)
        T.ptx_wait_group(0)
        if page:
            for r in T.Parallel(bm):  # a row that sees a key which is not there is NaN
                place = length[0] - queries + (first_row + r) // group
                total[r] = T.if_then_else(place < missing[0], total[r], nan)
        if low < end:
            for r, d in T.Parallel(bm, size):
                row = first_row + r
                if row < rows:
                    parts[split, b, row // group, g * group + row % group, d] = acc[r, d]
            for r in T.Parallel(bm):
                row = first_row + r
                if row < rows:
                    stats[0, split, b, row // group, g * group + row % group] = top[r]
                    stats[1, split, b, row // group, g * group + row % group] = total[r]

    @T.macro
    def combine(lengths, parts, stats, out, h, t, b):
        length = T.alloc_local((1,), "int32")
        share = T.alloc_local((1,), "int32")
        top = T.alloc_local((1,), "float32")
        total = T.alloc_local((1,), "float32")
        factor = T.alloc_local((1,), "float32")
        acc = T.alloc_fragment((wide,), "float32")
        cut(lengths, b, length, share)
        T.clear(acc)
        top[0] = -inf
        total[0] = T.if_then_else(length[0] == lengths[b], 0.0, nan)  # a length that may not be
        for s in T.serial(T.ceildiv(length[0], share[0])):
            top[0] = T.max(top[0], stats[0, s, b, t, h])
        top[0] = T.if_then_else(top[0] == -inf, 0.0, top[0])
        for s in T.serial(T.ceildiv(length[0], share[0])):  # in order: ten runs give the same bits
            factor[0] = T.exp2(stats[0, s, b, t, h] - top[0])
            total[0] += stats[1, s, b, t, h] * factor[0]
            for d in T.Parallel(wide):
                acc[d] += T.if_then_else(d < size, parts[s, b, t, h, d], 0) * factor[0]
        for d in T.Parallel(wide):
            if d < size:
                out[b, t, h, d] = T.if_then_else(total[0] == 0, 0, acc[d] / total[0])

    cache = (blocks, keys, kv_heads, size), (*steps, 1), dtype
    shape = batch, queries, heads
    query = (*shape, size), (*q_steps, 1), dtype
    kept, kept_stats = ((splits, *shape, size), "float32"), ((2, splits, *shape), "float32")

    if page:

        @T.prim_func
        def paged(
            q: T.StridedTensor(*query), k_cache: T.StridedTensor(*cache), v_cache: T.StridedTensor(*cache),
            lengths: T.Tensor((batch,), "int32"), table: T.StridedTensor((batch, most), table_steps, "int32"),
            parts: T.Tensor(*kept), stats: T.Tensor(*kept_stats), out: T.Tensor((*shape, size), dtype),
            scale: T.float32,
        ):  # fmt: skip
            with T.Kernel(kv_heads * tiles, splits, batch, threads=config.threads) as (x, split, b):
                attend(q, k_cache, v_cache, lengths, table, parts, stats, scale, x, split, b)
            with T.Kernel(heads, queries, batch, threads=_COMBINING) as (h, t, b):
                combine(lengths, parts, stats, out, h, t, b)

        return paged

    @T.prim_func
    def whole(
        q: T.StridedTensor(*query), k_cache: T.StridedTensor(*cache), v_cache: T.StridedTensor(*cache),
        lengths: T.Tensor((batch,), "int32"),
        parts: T.Tensor(*kept), stats: T.Tensor(*kept_stats), out: T.Tensor((*shape, size), dtype), scale: T.float32,
    ):  # fmt: skip
        with T.Kernel(kv_heads * tiles, splits, batch, threads=config.threads) as (x, split, b):
            attend(q, k_cache, v_cache, lengths, lengths, parts, stats, scale, x, split, b)
        with T.Kernel(heads, queries, batch, threads=_COMBINING) as (h, t, b):
            combine(lengths, parts, stats, out, h, t, b)

    return whole
