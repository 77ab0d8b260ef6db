"""attention_decode and attention_chunked in Triton: tiles, splits, and the launches of paged_kernel.py."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tilery.base.integers import ceil_div, next_power_of_2
from tilery.base.launch import Launch
from tilery.base.spec import TensorSpec, Work
from tilery.core.kernel import Kernel
from tilery.hardware.gpu import ARCHS, gpu
from tilery.ops.attention.call import PagedCall, max_splits
from tilery.ops.attention.triton import softmax
from tilery.ops.attention.triton.paged_kernel import Cache, Results, Scoring, Sequences, paged_attention
from tilery.ops.quantize.triton_fp8 import native

_MIN_KEYS = 128
_MAX_SEQUENCES = 65535  # along a grid's third axis


@dataclass(frozen=True)
class Config:
    block_m: int  # rows: query tokens times the heads that share keys
    block_n: int  # keys
    splits: int  # programs that share the keys of a row, at most
    num_warps: int
    num_stages: int

    @property
    def min_keys(self) -> int:
        """Keys of a split: with fewer, what it writes of them costs more than what is gained."""
        return max(self.block_n, _MIN_KEYS)

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


def _width(call: PagedCall) -> int:
    """Columns of a tile."""
    return max(next_power_of_2(call.head_dim), 16)


def _shared(call: PagedCall, config: Config) -> int:
    """Bytes that q and the tiles in flight take; without wgmma a tile is in registers when the next takes its place."""
    held = max(config.num_stages - (0 if config.block_m >= 64 else 1), 1)
    tiles = held * 2 * config.block_n * call.k_cache.dtype.itemsize
    return _width(call) * (tiles + config.block_m * call.q.dtype.itemsize)


def _fitting(call: PagedCall, block_m: int, block_n: int, splits: int, num_warps: int, num_stages: int) -> Config:
    """The config, with fewer stages or keys until it fits shared memory. Below three stages loads do not overlap."""
    scratch = 3 * 1024 if block_m >= 64 else 8 * 1024
    most = gpu(call.q.device).shared_per_block - scratch
    while _shared(call, config := Config(block_m, block_n, splits, num_warps, num_stages)) > most and block_n > 16:
        if num_stages > 3 or (num_stages == 3 and block_n <= 32):
            num_stages -= 1
        else:
            block_n //= 2
    return config


class Paged(Kernel):
    """What both kernels have in common."""

    archs = ARCHS
    Config = Config

    def refusal(self, call: PagedCall, config: Config | None = None) -> str | None:
        most = _MAX_SEQUENCES - (call.cu_seqlens_q is not None)  # tokens of no sequence are a sequence too
        if call.batch > most:
            return f"takes up to {most} sequences, got {call.batch}"
        if config is None:
            return None
        sizes = config.block_m, config.block_n, config.splits
        if any(size < least or size & (size - 1) for size, least in zip(sizes, (16, 16, 1))):
            return f"blocks must be powers of two from 16 on and splits one from 1 on, got {config}"
        limit = gpu(call.q.device).shared_per_block
        if (need := _shared(call, config)) > limit:
            return f"{config} needs {need} bytes of shared memory, a block has {limit}"
        return None

    def estimate(self, call: PagedCall, config: Config) -> Work:
        """Counts splits as programs of their own: the model compares what one program reads."""
        splits = max_splits(config.splits, call.visible_keys, config.min_keys)
        tiles, keys = ceil_div(call.rows, config.block_m), ceil_div(call.visible_keys, splits)
        read = 2 * keys * call.head_dim * call.k_cache.dtype.itemsize
        written = min(call.rows, config.block_m) * call.head_dim * 4
        programs = call.batch * call.kv_heads * tiles * splits
        return Work(programs, 4 * config.block_m * keys * _width(call), read + written)

    def workspace(self, call: PagedCall, config: Config) -> dict[str, TensorSpec]:
        return softmax.workspace(call, self._splits(call, config))

    def _splits(self, call: PagedCall, config: Config) -> int:
        keys = call.visible_keys + (config.block_n if call.effective_window else 0)  # it begins anywhere in a block
        return max_splits(config.splits, keys, config.min_keys)

    def launches(self, call: PagedCall, config: Config) -> list[Launch]:
        format, splits = call.fp8_format, self._splits(call, config)
        k, v = (x._replace(dtype=torch.uint8) if format else x for x in (call.k_cache, call.v_cache))
        strides = (call.k_cache.stride(dim) for dim in range(3))
        partials = (call.partial_out, call.partial_stats) if splits > 1 else (None, None)
        args = {
            "q_ptr": call.q, "q_strides": call.q_strides, "cache": Cache(k, v, call.k_scale, call.v_scale, *strides),
            "sequence": Sequences(call.lengths, call.cu_seqlens_q, call.block_table, call.table_stride),
            "scoring": Scoring(call.softmax_scale, float(call.softcap), call.sinks),
            "results": Results(call.out, *partials, call.lse), "sequences": call.batch, "queries": call.queries,
            "tokens": call.tokens, "splits": splits, "pages": call.k_cache.shape[0], "max_keys": call.max_keys,
            "window": call.effective_window,
        }  # fmt: skip
        k_per_head, v_per_head = (scale is not None and scale.shape[0] > 1 for scale in (call.k_scale, call.v_scale))
        constants = {
            "KV_HEADS": call.kv_heads, "GROUP": call.group, "D": call.head_dim, "PAGE": call.page,
            "K_PER_HEAD": k_per_head, "V_PER_HEAD": v_per_head,
            "FORMAT": format, "NATIVE": format is not None and native(call.q.device),
            "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_D": _width(call),
            "SPLITS": config.splits if splits > 1 else 1, "MIN_KEYS": config.min_keys,
            "UNMASKED_LOOP": config.block_m >= 64 and call.k_cache.shape[0] > 0,
            "WINDOW": call.effective_window > 0, "SOFTCAP": call.softcap > 0,
            "FAR": call.k_cache.stride(1) * config.block_n >= 2**30, "CAUSAL": call.causal,
        }  # fmt: skip
        unused = call.cu_seqlens_q is not None and splits == 1  # else `combine` writes tokens of no sequence
        grid = ceil_div(call.rows, config.block_m) * call.kv_heads, splits, call.batch + unused
        found = [Launch(paged_attention, grid, args, constants, config.options, pdl=True)]
        if splits > 1:
            how = config.splits, config.block_n, config.min_keys, call.sinks, call.lse
            found.append(softmax.combine(call, *how, lse_by_row=True))
        return found


class AttentionDecode(Paged):
    """Split KV: a program takes a split of a sequence's keys for all queries and heads that share them.

    Nothing here looks at the batch: a sequence must be split alike in any.
    """

    programs = 32, 256  # of one sequence: at least and at most
    tiles = (  # keys, warps, stages
        *((32, 2, stages) for stages in (4, 5)),
        *((32, 4, stages) for stages in (4, 5)),
        *((64, 2, stages) for stages in (3, 4)),
        *((64, 4, stages) for stages in (3, 4, 5)),
        *((128, 4, stages) for stages in (2, 3)),
        *((128, 8, stages) for stages in (2, 3)),
    )

    def _rows(self, call: PagedCall) -> int:
        return min(max(next_power_of_2(call.rows), 16), 64)

    def _wanted_splits(self, call: PagedCall) -> int:
        """Many splits read fast what is one sequence; but each one's result for every row is written and read again."""
        least, most = self.programs
        programs = min(max(1024 // max(call.rows, 1), least), most)
        return next_power_of_2(max(programs // call.kv_heads, 1))

    def default(self, call: PagedCall) -> Config:
        splits, rows = self._wanted_splits(call), self._rows(call)
        if call.q.dtype == torch.float32:
            return _fitting(call, 16, 16, splits, num_warps=4, num_stages=2)
        keys = 64 if call.head_dim <= 128 and call.rows > 8 else 32
        if rows < 64:
            return _fitting(call, rows, keys, splits, num_warps=4, num_stages=4 if keys == 32 else 3)
        return _fitting(call, 64, keys, splits, num_warps=4 if call.head_dim <= 128 else 8, num_stages=3)

    def configs(self, call: PagedCall) -> Sequence[Config]:
        wanted = self._wanted_splits(call)
        if call.q.dtype == torch.float32:
            found = [Config(16, keys, wanted, *rest) for keys, *rest in ((16, 4, 2), (16, 4, 3), (32, 8, 2))]
        else:
            splits, rows = dict.fromkeys(max(int(wanted * times), 1) for times in (1, 2, 0.5)), self._rows(call)
            # With others scores and P take more registers than a thread has; 64 rows are for wgmma, of 4 warps.
            most = 1024 if rows >= 64 else 512
            tiles = [tile for tile in self.tiles if rows * tile[0] <= most * tile[1] and tile[1] >= rows // 16]
            found = [Config(rows, keys, s, *rest) for s in splits for keys, *rest in tiles]
        return [c for c in found if self.refusal(call, c) is None]


class AttentionChunked(Paged):
    """Tiles of a chunk's rows, those of all heads that share keys; where tiles are few, keys are split too."""

    def _config(
        self, call: PagedCall, block_m: int, block_n: int, num_warps: int, num_stages: int, times: int = 1
    ) -> Config:
        """With as many splits as fill the SMs once, each with eight blocks of keys at least; two small tiles fit one.

        `times`: so many times as many splits.
        """
        rows = min(max(next_power_of_2(call.rows), 16), block_m)
        c = _fitting(call, rows, block_n, 1, num_warps, num_stages)
        tiles = ceil_div(call.tokens * call.group, c.block_m) * call.kv_heads
        places = gpu(call.q.device).sms * (2 if c.block_m <= 64 else 1)
        fill, most = places // max(tiles, 1), call.visible_keys // (8 * c.block_n)
        splits = 2 ** (max(min(fill, most), 1).bit_length() - 1) * times
        return Config(c.block_m, c.block_n, splits, c.num_warps, c.num_stages)

    def default(self, call: PagedCall) -> Config:
        if call.q.dtype == torch.float32:
            return self._config(call, 32, 32, num_warps=4, num_stages=2)
        if call.fp8_format is None:
            return self._config(call, 64, 64, num_warps=4 if call.head_dim <= 128 else 8, num_stages=3)
        if native(call.q.device):  # fp8 is widened in registers: by hand where the device does not know it
            return self._config(call, 128, 64, num_warps=8, num_stages=4)
        return self._config(call, 64, 32, num_warps=4, num_stages=3)

    def configs(self, call: PagedCall) -> Sequence[Config]:
        if call.q.dtype == torch.float32:
            return [self._config(call, 32, keys, warps, 2) for keys in (16, 32) for warps in (4, 8)]
        tiles = ((64, 64, 4), (64, 128, 4), (64, 64, 8), (128, 64, 8), (128, 128, 8))
        found = [self._config(call, *tile, stages, times) for times in (1, 2) for tile in tiles for stages in (2, 3, 4)]
        return [c for c in dict.fromkeys(found) if self.refusal(call, c) is None]


attention_decode, attention_chunked = AttentionDecode(), AttentionChunked()
