"""attention and attention_lse in CUDA C++ for Hopper, by TMA and wgmma: tiles, and the launch of attention.cu.

Each consumer warpgroup has 64 queries; blocks of keys stream past it from the last to the first, loaded by a producer
warp. Heads whose size is no multiple of 64 lie in tiles that are, with zeros behind.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from tilery.base.integers import ceil_div
from tilery.base.launch import Argument, Host, Launch, Persistent, fill
from tilery.base.spec import Work, dtype_name
from tilery.core.kernel import Kernel
from tilery.hardware.gpu import Gpu, gpu
from tilery.languages import tensor_maps
from tilery.languages.cuda_source import Source
from tilery.languages.tensor_maps import TensorMapOf
from tilery.ops.attention.call import AttentionCall

FILE = Path(__file__).with_name("attention.cu")

_FAR = 2**29  # tokens: more than a query sees
_ALIGNMENT, _BARRIERS = 1024, 16  # bytes to align tiles, and of a stage's barriers
_QUEUE = 96  # bytes of the current tile and the next, which the producer hands to the consumers
_MAX_STAGES = 8

# Queries and keys of a tile by the columns of a head, what is likely best first. Larger ones do not fit the registers.
_TILES = {
    64: ((192, 112), (128, 128), (128, 192)),
    128: ((128, 128), (128, 176)),
    192: ((128, 112), (128, 96)),
    256: ((128, 80), (128, 64)),
}


def columns(head_dim: int) -> int:
    """Columns that a head takes in shared memory: 128 bytes at a time."""
    return ceil_div(head_dim, 64) * 64


def threads(block_m: int) -> int:
    """A warpgroup for 64 rows each, and one that loads."""
    return block_m * 2 + 128


def shared_bytes(block_m: int, block_n: int, stages: int, width: int) -> int:
    """Shared memory of a block, for heads that take so many columns."""
    pipeline = stages * (block_n * width * 2 + _BARRIERS)
    return _ALIGNMENT + pipeline + block_m * width * 2 + _BARRIERS + _QUEUE


def most_stages(device: Gpu, block_m: int, block_n: int, width: int, blocks: int = 1) -> int:
    """Stages that shared memory has room for, with so many blocks of threads on an SM."""
    room = device.shared_per_block // blocks - device.reserved_shared - shared_bytes(block_m, block_n, 0, width)
    return min(room // (block_n * width * 2 + _BARRIERS), _MAX_STAGES)


def or_null(x: Any) -> Any:
    """A tensor as an argument of a kernel, or a null pointer for None."""
    return 0 if x is None else x


def window_left(window: int) -> int:
    """How far to the left of its position a query sees."""
    return min(window, _FAR) - 1 if window else _FAR


@dataclass(frozen=True)
class Config:
    block_m: int  # queries, 64 for each warpgroup
    block_n: int  # keys
    stages: int  # blocks of keys or of values in the pipeline
    multicast: int = 1  # blocks of a cluster that load keys and values for each other
    persistent: bool = True  # blocks go from tile to tile, else each has one

    old_names: ClassVar[dict[str, str]] = {"share": "multicast"}  # in files of tuned configs


class Attention(Kernel):
    """attention and attention_lse, which differ in whether the call has an lse."""

    archs = ("sm_90",)
    Config = Config
    source = Source(FILE, "hopper_attention")
    tiles: ClassVar[Mapping[int, tuple[tuple[int, int], ...]]] = _TILES
    loaded: ClassVar[tuple[str, ...]] = ("q", "k", "v")  # by TMA

    def width(self, call: AttentionCall) -> int:
        """Columns that a head of q or k takes in shared memory."""
        return columns(call.head_dim)

    def refusal(self, call: AttentionCall, config: Config | None = None) -> str | None:
        if call.q.dtype not in (torch.float16, torch.bfloat16):
            return f"multiplies fp16 and bf16 alone, got {dtype_name(call.q.dtype)}"
        if why := self._option_refusal(call):
            return why
        tokens, pairs = max(call.tokens, call.key_tokens), _pairs(call)
        if tokens >= _FAR or pairs * ceil_div(call.queries, 64) >= _FAR:
            return f"numbers tokens and tiles up to {_FAR}, got {tokens} tokens in {pairs} heads"
        for name in self.loaded:
            x = getattr(call, name)
            sizes, strides = _view(call, x)
            if all(sizes) and (why := tensor_maps.heads_refusal(name, x, sizes, strides)):
                return why
        return None if config is None else self._config_refusal(call, config)

    def _option_refusal(self, call: AttentionCall) -> str | None:
        asked = {
            "key_mask": call.key_mask is not None, "bias": call.bias is not None, "slopes": call.slopes is not None,
            "sinks": call.sinks is not None, "softcap": call.softcap > 0,
        }  # fmt: skip
        if extras := [name for name, there in asked.items() if there]:
            return f"takes no more than packed sequences, causal and window, got {', '.join(extras)}"
        if call.head_dim != call.value_dim:
            return f"heads of keys and values must be of one size, got {call.head_dim} and {call.value_dim}"
        return None

    def _config_refusal(self, call: AttentionCall, config: Config) -> str | None:
        tile, known = (config.block_m, config.block_n), self.tiles[self.width(call)]
        if tile not in known:
            said = ", ".join(f"{m} × {n}" for m, n in known)
            return f"tiles of heads of {call.head_dim} must be {said}, got {config.block_m} × {config.block_n}"
        two = config.multicast == 2 and not call.packed and config.block_m == 128  # more queries spill registers
        if config.multicast != 1 and not two:
            what = "multicast must be 1 or, of sequences that are not packed and tiles of 128 queries, 2"
            return f"{what}, got {config.multicast}"
        most = most_stages(gpu(call.q.device), *tile, self.width(call))
        if not 2 <= config.stages <= most:
            return f"stages must be 2 to {most} for shared memory to hold them, got {config.stages}"
        return None

    def _config(self, call: AttentionCall, tile: tuple[int, int], multicast: int, persistent: bool) -> Config:
        return Config(*tile, most_stages(gpu(call.q.device), *tile, self.width(call)), multicast, persistent)

    def default(self, call: AttentionCall) -> Config:
        """Packed sequences differ in length: their tiles go to whichever SM is free.

        Multicast reads half as much of the L2, which has more to give; it is as fast at best.
        """
        tile = next(tile for tile in self.tiles[self.width(call)] if tile[0] == 128 or call.queries > 128)
        return self._config(call, tile, 1, persistent=not call.packed)

    def configs(self, call: AttentionCall) -> list[Config]:
        forms = ((1, True), (1, False), (2, True))
        found = [self._config(call, tile, *form) for tile in self.tiles[self.width(call)] for form in forms]
        return [c for c in dict.fromkeys((self.default(call), *found)) if self.refusal(call, c) is None]

    def estimate(self, call: AttentionCall, config: Config) -> Work:
        keys = call.keys_of_tile(config.block_n)
        moved = (config.block_m + keys) * (call.head_dim + call.value_dim) * call.q.dtype.itemsize
        blocks = call.batch * call.heads * ceil_div(call.queries, config.block_m)
        multiplied = self.width(call) + columns(call.value_dim)
        return Work(blocks, 2 * config.block_m * keys * multiplied, moved)

    def launches(self, call: AttentionCall, config: Config) -> list[Launch | Host]:
        if call.key_tokens == 0 and not call.packed:
            clear = Host(torch.Tensor.zero_, (call.out,))
            return [clear] if call.lse is None else [clear, fill(call.lse, -torch.inf)]
        pairs, tiles = _pairs(call), ceil_div(call.queries, config.block_m * config.multicast)
        left, lse = window_left(call.effective_window), call.lse
        head_bytes = call.keys * (call.head_dim + call.value_dim) * call.q.dtype.itemsize  # keys and values of a head
        keys_in_l2 = max(gpu(call.q.device).l2_for_reuse // max(head_bytes, 1), 1)
        lse_strides = (0, 0) if lse is None else (0, lse.stride(0)) if call.packed else lse.strides[:2]
        args = {
            **self._maps(call, config), "out": call.out, "lse": or_null(lse),
            "cu_seqlens_q": or_null(call.cu_seqlens_q), "cu_seqlens_k": or_null(call.cu_seqlens_k),
            **dict(zip(("out_batch_stride", "out_row_stride", "out_head_stride"), call.strides(call.out))),
            "lse_batch_stride": lse_strides[0], "lse_head_stride": lse_strides[1],
            "sequences": call.batch, "heads": call.heads, "heads_per_kv": call.group, "seqlen_q": call.tokens,
            "seqlen_k": call.key_tokens, "max_seqlen_q": call.queries, "max_seqlen_k": call.keys,
            "tiles_per_head": tiles, "heads_per_group": min(call.group * keys_in_l2, pairs),
            "window_left": left, "window_right": 0 if call.causal else left, "softmax_scale": call.softmax_scale,
        }  # fmt: skip
        constants = {
            "T": call.q.dtype, **self._sizes(call), "BLOCK_N": config.block_n,
            "WARPGROUPS": config.block_m // 64, "STAGES": config.stages, "MULTICAST": config.multicast,
        }  # fmt: skip
        shared = shared_bytes(config.block_m, config.block_n, config.stages, self.width(call))
        options = {"threads": threads(config.block_m), "shared": shared}
        blocks = pairs * tiles * config.multicast
        grid = Persistent(blocks) if config.persistent else blocks
        return [Launch(self.source, grid, args, constants, options, cluster=config.multicast, pdl=True)]

    def _sizes(self, call: AttentionCall) -> dict[str, int]:
        """The sizes of a head, by the names of the template's parameters."""
        return {"HEAD_DIM": call.head_dim}

    def _maps(self, call: AttentionCall, config: Config) -> dict[str, TensorMapOf]:
        """Tensor maps by the names of the kernel's parameters.

        There is no map of nothing, but packed sequences may be invalid all the same: then q stands for keys and values.
        """
        maps = {}
        for name in self.loaded:
            of_q = name.startswith("q")
            x = getattr(call, name) if of_q or call.key_tokens else call.q
            maps[f"{name}_map"] = _map(call, x, config.block_m if of_q else config.block_n // config.multicast)
        return maps


def _pairs(call: AttentionCall) -> int:
    """Pairs of a sequence and a head; packed tokens of no sequence are a sequence too."""
    return (call.batch + call.packed) * call.heads


def _view(call: AttentionCall, x: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """x as [sequences, heads, tokens, values]: sizes, innermost first, and the strides of all but the values."""
    sequence, token, head = call.strides(x)
    sequences, tokens, heads = call.sizes(x)
    return (x.shape[-1], tokens, heads, sequences), (token, head, sequence)


def _map(call: AttentionCall, x: Argument, rows: int) -> TensorMapOf:
    return TensorMapOf(x, *_view(call, x), (rows,))


attention = Attention()
