"""attention_decode in TileLang: keys are split among blocks (split KV), a second launch combines the splits' results.

A warp has 16 rows of its own, and tiles of keys and values pass through pipeline stages. How a sequence is split
depends on its own length and the config alone, never on the batch: it gives the same bits in any. A split's result for
a row is its online softmax (row_max, row_sum) in base 2 and the sum of P · values, all fp32: partial_out
[splits, B, Q, H, D] and partial_stats [2, splits, B, Q, H].
"""
# TileLang's annotations are calls:
# mypy: ignore-errors

from dataclasses import dataclass
from typing import Any, NamedTuple

import tilelang.language as T
import torch

from tilery.base.integers import ceil_div
from tilery.base.launch import Host, Launch
from tilery.base.spec import TensorSpec, Work, dtype_name
from tilery.core.kernel import Kernel
from tilery.hardware.gpu import gpu
from tilery.languages import tilelang_glue
from tilery.ops.attention.call import PagedCall
from tilery.ops.attention.indices import fill_without_keys

_LOG2E = 1.4426950408889634
_COMBINING = 64  # threads that combine a row
# Copies as they are, waited for where the loop says: T.Pipelined builds no loop whose length only the device knows.
_ASYNC = {"parallel_prefer_async": True, "parallel_async_without_async_commit_wait": True}
_MAX_SEQUENCES = 65535  # along a grid's third axis
_FAR = 2**30  # keys: they are numbered in int32, as are those of the tiles behind the last
_ROWS, _KEYS = (16, 32, 64, 128), (16, 32, 64, 128)


class Shape(NamedTuple):
    """What a kernel is built for; batch, keys and strides are its arguments."""

    queries: int
    heads: int
    kv_heads: int
    size: int
    page: int  # tokens of a page of the cache; 0: a sequence is in one piece
    dtype: str
    aligned: bool  # rows of q and of the caches start on 16 bytes


@dataclass(frozen=True)
class Config:
    block_m: int  # rows: query tokens times the heads that share keys
    block_n: int  # keys
    splits: int  # blocks that share the keys of a row, at most
    stages: int  # tiles of keys and of values that have a place in shared memory

    @property
    def threads(self) -> int:
        return 2 * self.block_m


def decode(shape: Shape, config: Config) -> Any:
    queries, heads, kv_heads, size, page, dtype, aligned = shape
    group = heads // kv_heads
    bm, bn, stages = config.block_m, config.block_n, config.stages
    rows, tiles = queries * group, ceil_div(queries * group, bm)
    batch, splits, most = T.dynamic("batch"), T.dynamic("splits"), T.dynamic("most")
    pages, keys = (T.dynamic("pages"), page) if page else (batch, T.dynamic("keys"))
    max_keys = most * page if page else keys
    q_steps = tuple(T.dynamic(f"q_step{d}", "int64") for d in range(3))
    steps = tuple(T.dynamic(f"step{d}", "int64") for d in range(3))
    table_steps = tuple(T.dynamic(f"table_step{d}", "int64") for d in range(2))
    wide = ceil_div(size, _COMBINING) * _COMBINING
    inf, nan = T.infinity("float32"), T.float32(float("nan"))

    @T.macro
    def measure(lengths, b, length, split_size):
        """Keys of the sequence, and how many of them a split has: a multiple of block_n."""
        length[0] = T.min(T.max(lengths[b], 0), max_keys)
        split_size[0] = T.max(T.ceildiv(length[0], config.splits * bn), 1) * bn

    @T.macro
    def load_tile(cache, tiles_in_flight, table, b, g, start, end, stage):
        """Ask for a tile of keys or values; nothing from token `end` on is read, and zeros stand for it.

        The same is true of a page that the cache does not have: TileLang checks indices that it cannot bound itself.
        """
        for n, d in T.Parallel(bn, size, annotations=_ASYNC if aligned else {}):
            if page:  # the table is looked at before it is known whether the key is there
                known = T.max(T.min(start + n, end - 1), 0)
                tiles_in_flight[stage, n, d] = T.if_then_else(
                    start + n < end, cache[table[b, known // page], (start + n) % page, g, d], 0
                )
            else:
                tiles_in_flight[stage, n, d] = T.if_then_else(start + n < end, cache[b, start + n, g, d], 0)

    @T.macro
    def find_missing(table, b, start, end, missing):
        """The first key from `start` on, of a tile, whose page the cache does not have, if it is before `missing`."""
        for i in T.unroll(max(bn // page, 1)):
            key = start + i * page
            entry = table[b, T.min(key, end - 1) // page]
            if (key < end) & ((entry < 0) | (entry >= pages)):
                missing[0] = T.min(missing[0], key)

    @T.macro
    def attend(q, k_cache, v_cache, lengths, table, partial_out, partial_stats, scale, x, split, b):
        if aligned:  # what makes 16-byte copies of the loads below
            for stride in (*q_steps, *steps):
                T.assume(stride % 8 == 0)
        g, first_row = x % kv_heads, x // kv_heads * bm
        q_tile = T.alloc_shared((bm, size), dtype)
        k_tiles = T.alloc_shared((stages, bn, size), dtype)
        v_tiles = T.alloc_shared((stages, bn, size), dtype)
        scores = T.alloc_fragment((bm, bn), "float32")
        p = T.alloc_fragment((bm, bn), dtype)
        acc = T.alloc_fragment((bm, size), "float32")
        row_max = T.alloc_fragment((bm,), "float32")
        old_max = T.alloc_fragment((bm,), "float32")
        finite = T.alloc_fragment((bm,), "float32")
        rescale = T.alloc_fragment((bm,), "float32")
        row_sum = T.alloc_fragment((bm,), "float32")
        added = T.alloc_fragment((bm,), "float32")
        length = T.alloc_local((1,), "int32")
        split_size = T.alloc_local((1,), "int32")
        missing = T.alloc_local((1,), "int32")  # the first key whose page the cache does not have
        missing[0] = T.max_value("int32")
        measure(lengths, b, length, split_size)
        low = split * split_size[0]
        end = T.min(low + split_size[0], length[0])
        for ahead in T.unroll(stages - 1):
            load_tile(k_cache, k_tiles, table, b, g, low + ahead * bn, end, ahead)
            load_tile(v_cache, v_tiles, table, b, g, low + ahead * bn, end, ahead)
            T.ptx_commit_group()
        for r, d in T.Parallel(bm, size):
            row = first_row + r
            q_tile[r, d] = T.if_then_else(row < rows, q[b, row // group, g * group + row % group, d], 0)
        T.clear(acc)
        T.clear(row_sum)
        T.fill(row_max, -inf)
        for step in T.serial(T.ceildiv(T.max(end - low, 0), bn)):
            start = low + step * bn
            T.ptx_wait_group(stages - 2)
            T.sync_threads()  # this tile is there for all, and the one before is no longer read
            load_tile(k_cache, k_tiles, table, b, g, start + (stages - 1) * bn, end, (step + stages - 1) % stages)
            load_tile(v_cache, v_tiles, table, b, g, start + (stages - 1) * bn, end, (step + stages - 1) % stages)
            T.ptx_commit_group()
            if page:
                find_missing(table, b, start, end, missing)
            T.gemm(
                q_tile, k_tiles[step % stages, :, :], scores, transpose_B=True, policy=T.GemmWarpPolicy.FullRow,
                clear_accum=True,
            )  # fmt: skip
            for r, n in T.Parallel(bm, bn):
                position = length[0] - queries + (first_row + r) // group
                visible = (start + n < end) & (start + n <= position)
                scores[r, n] = T.if_then_else(visible, scores[r, n] * (scale * _LOG2E), -inf)
            T.copy(row_max, old_max)
            T.reduce_max(scores, row_max, dim=1, clear=False)
            for r in T.Parallel(bm):
                finite[r] = T.if_then_else(row_max[r] == -inf, 0.0, row_max[r])  # a row that sees nothing yet
                rescale[r] = T.exp2(old_max[r] - finite[r])
            for r, n in T.Parallel(bm, bn):
                scores[r, n] = T.exp2(scores[r, n] - finite[r])
            T.reduce_sum(scores, added, dim=1)
            for r in T.Parallel(bm):
                row_sum[r] = row_sum[r] * rescale[r] + added[r]
            T.copy(scores, p)
            for r, d in T.Parallel(bm, size):
                acc[r, d] *= rescale[r]
            T.gemm(p, v_tiles[step % stages, :, :], acc, policy=T.GemmWarpPolicy.FullRow)
        T.ptx_wait_group(0)
        if page:
            for r in T.Parallel(bm):  # a row that sees a key which is not there is NaN
                position = length[0] - queries + (first_row + r) // group
                row_sum[r] = T.if_then_else(position < missing[0], row_sum[r], nan)
        if low < end:
            for r, d in T.Parallel(bm, size):
                row = first_row + r
                if row < rows:
                    partial_out[split, b, row // group, g * group + row % group, d] = acc[r, d]
            for r in T.Parallel(bm):
                row = first_row + r
                if row < rows:
                    partial_stats[0, split, b, row // group, g * group + row % group] = row_max[r]
                    partial_stats[1, split, b, row // group, g * group + row % group] = row_sum[r]

    @T.macro
    def combine(lengths, partial_out, partial_stats, out, h, t, b):
        length = T.alloc_local((1,), "int32")
        split_size = T.alloc_local((1,), "int32")
        row_max = T.alloc_local((1,), "float32")
        row_sum = T.alloc_local((1,), "float32")
        rescale = T.alloc_local((1,), "float32")
        acc = T.alloc_fragment((wide,), "float32")
        measure(lengths, b, length, split_size)
        T.clear(acc)
        row_max[0] = -inf
        row_sum[0] = T.if_then_else(length[0] == lengths[b], 0.0, nan)  # a length that may not be
        for s in T.serial(T.ceildiv(length[0], split_size[0])):
            row_max[0] = T.max(row_max[0], partial_stats[0, s, b, t, h])
        row_max[0] = T.if_then_else(row_max[0] == -inf, 0.0, row_max[0])
        for s in T.serial(T.ceildiv(length[0], split_size[0])):  # in order: ten runs give the same bits
            rescale[0] = T.exp2(partial_stats[0, s, b, t, h] - row_max[0])
            row_sum[0] += partial_stats[1, s, b, t, h] * rescale[0]
            for d in T.Parallel(wide):
                acc[d] += T.if_then_else(d < size, partial_out[s, b, t, h, d], 0) * rescale[0]
        for d in T.Parallel(wide):
            if d < size:
                out[b, t, h, d] = T.if_then_else(row_sum[0] == 0, 0, acc[d] / row_sum[0])

    cache = (pages, keys, kv_heads, size), (*steps, 1), dtype
    row = batch, queries, heads
    query = (*row, size), (*q_steps, 1), dtype
    partial, partial_stat = ((splits, *row, size), "float32"), ((2, splits, *row), "float32")

    if page:

        @T.prim_func
        def paged(
            q: T.StridedTensor(*query), k_cache: T.StridedTensor(*cache), v_cache: T.StridedTensor(*cache),
            lengths: T.Tensor((batch,), "int32"), table: T.StridedTensor((batch, most), table_steps, "int32"),
            partial_out: T.Tensor(*partial), partial_stats: T.Tensor(*partial_stat),
            out: T.Tensor((*row, size), dtype), scale: T.float32,
        ):  # fmt: skip
            with T.Kernel(kv_heads * tiles, splits, batch, threads=config.threads) as (x, split, b):
                attend(q, k_cache, v_cache, lengths, table, partial_out, partial_stats, scale, x, split, b)
            with T.Kernel(heads, queries, batch, threads=_COMBINING) as (h, t, b):
                combine(lengths, partial_out, partial_stats, out, h, t, b)

        return paged

    @T.prim_func
    def whole(
        q: T.StridedTensor(*query), k_cache: T.StridedTensor(*cache), v_cache: T.StridedTensor(*cache),
        lengths: T.Tensor((batch,), "int32"), partial_out: T.Tensor(*partial), partial_stats: T.Tensor(*partial_stat),
        out: T.Tensor((*row, size), dtype), scale: T.float32,
    ):  # fmt: skip
        with T.Kernel(kv_heads * tiles, splits, batch, threads=config.threads) as (x, split, b):
            attend(q, k_cache, v_cache, lengths, lengths, partial_out, partial_stats, scale, x, split, b)
        with T.Kernel(heads, queries, batch, threads=_COMBINING) as (h, t, b):
            combine(lengths, partial_out, partial_stats, out, h, t, b)

    return whole


class AttentionDecode(Kernel):
    """Nothing here looks at the batch: a sequence must be split alike in any."""

    archs = ("sm_90",)
    Config = Config

    def refusal(self, call: PagedCall, config: Config | None = None) -> str | None:
        q, k_cache = call.q, call.k_cache
        if q.dtype not in (torch.float16, torch.bfloat16):
            return f"T.gemm takes fp16 and bf16, and would round {dtype_name(q.dtype)} to tf32"
        if k_cache.dtype != q.dtype:
            return f"takes a cache of q's dtype, {dtype_name(q.dtype)}, got {dtype_name(k_cache.dtype)}"
        if call.window or call.softcap or call.sinks is not None:
            sinks = "none" if call.sinks is None else "given"
            given = f"window={call.window}, softcap={call.softcap}, sinks={sinks}"
            return f"takes neither a window nor a softcap nor sinks, got {given}"
        if call.max_keys >= _FAR:
            return f"numbers keys up to {_FAR}, got {call.max_keys}"
        if call.batch > _MAX_SEQUENCES:
            return f"takes up to {_MAX_SEQUENCES} sequences, got {call.batch}"
        return self._config_refusal(call, config) if config else None

    def _config_refusal(self, call: PagedCall, config: Config) -> str | None:
        if config.block_m not in _ROWS or config.block_n not in _KEYS:
            return f"block_m and block_n must be powers of two from 16 to 128, got {config}"
        if not 2 <= config.stages <= 8 or not 1 <= config.splits <= _MAX_SEQUENCES:
            return f"stages must be 2 to 8 and splits 1 to {_MAX_SEQUENCES}, got {config}"
        limit, need = gpu(call.q.device).shared_per_block, self.shared(call, config)
        return f"{config} needs {need} bytes of shared memory, a block has {limit}" if need > limit else None

    def shared(self, call: PagedCall, config: Config) -> int:
        """Bytes of q, and of the stages of keys and values; the first starts on 1024 bytes."""
        return 2 * call.head_dim * (config.block_m + 2 * config.stages * config.block_n) + 1024

    def default(self, call: PagedCall) -> Config:
        """64 rows even for few: on sm_90 wgmma multiplies them, and its time is less than that of the keys' way."""
        limit, keys, stages = gpu(call.q.device).shared_per_block, 64, 3
        while self.shared(call, config := Config(64, keys, self._wanted_splits(call), stages)) > limit:
            stages, keys = (stages - 1, keys) if stages > 2 else (stages, keys // 2)
        return config

    def _wanted_splits(self, call: PagedCall) -> int:
        """Programs of one sequence: about one for each SM."""
        return 1 << max(gpu(call.q.device).sms_power_of_2 // call.kv_heads, 1).bit_length() - 1

    def configs(self, call: PagedCall) -> list[Config]:
        few = next((rows for rows in _ROWS if call.rows <= rows), _ROWS[-1])
        splits = dict.fromkeys(max(int(self._wanted_splits(call) * times), 1) for times in (1, 2, 0.5))
        tiles = (32, 2), (32, 4), (64, 2), (64, 3), (64, 4), (128, 2)
        found = [Config(rows, keys, s, stages) for s in splits for rows in sorted({few, 64}) for keys, stages in tiles]
        return [c for c in found if self.refusal(call, c) is None]

    def estimate(self, call: PagedCall, config: Config) -> Work:
        """Few blocks that share a row's keys are the same as many: what counts is what one of them reads."""
        splits, rows, size = self._splits(call, config), call.rows, call.head_dim
        keys = ceil_div(call.max_keys, splits)
        nbytes = 4 * keys * size + 4 * min(rows, config.block_m) * size
        blocks = call.batch * call.kv_heads * ceil_div(rows, config.block_m) * splits
        return Work(blocks, 4 * config.block_m * keys * size, nbytes)

    def _splits(self, call: PagedCall, config: Config) -> int:
        """Number of splits that are launched: no more than the longest sequence can fill."""
        return max(min(config.splits, ceil_div(call.max_keys, config.block_n)), 1)

    def workspace(self, call: PagedCall, config: Config) -> dict[str, TensorSpec]:
        splits, q = self._splits(call, config), call.q
        return {
            "partial_out": TensorSpec.contiguous((splits, *q.shape), torch.float32, q.device),
            "partial_stats": TensorSpec.contiguous((2, splits, *q.shape[:3]), torch.float32, q.device),
        }

    def launches(self, call: PagedCall, config: Config) -> list[Launch | Host]:
        if not call.max_keys or not call.k_cache.shape[0]:  # there is no key
            return [Host(fill_without_keys, (call.out, None, call.lengths, call.max_keys))]
        tensors, paged = (call.q, call.k_cache, call.v_cache), call.block_table is not None
        aligned = all(x.aligned and not any(x.stride(d) % 8 for d in range(3)) for x in tensors)
        _, queries, heads, size = call.q.shape
        dtype = tilelang_glue.NAMES[call.q.dtype]
        shape = Shape(queries, heads, call.kv_heads, size, call.page, dtype, aligned)
        args = {
            "q": call.q, "k_cache": call.k_cache, "v_cache": call.v_cache, "lengths": call.lengths,
            **({"table": call.block_table} if paged else {}), "partial_out": call.partial_out,
            "partial_stats": call.partial_stats, "out": call.out, "scale": call.softmax_scale,
        }  # fmt: skip
        return [Launch(decode, 1, args, {"shape": shape, "config": config})]


attention_decode = AttentionDecode()
