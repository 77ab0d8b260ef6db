"""attention_backward in CUDA C++ for Hopper, by TMA and wgmma: tiles, and the launches of attention_backward.cu.

In two passes, three launches: delta and lse in base 2; dk and dv by tiles of keys; dq by tiles of queries. Both passes
multiply S and dP anew, seven products where five would do, so that no two blocks add to one sum.

In one pass (attention_backward_one_pass.cu) tiles of keys add to dq too, in fp32 and in turns: the same bits in every
run. The third launch rounds dq.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tilery.base.integers import ceil_div, next_power_of_2
from tilery.base.launch import Argument, Host, Launch
from tilery.base.spec import TensorSpec, Work, dtype_name
from tilery.core.kernel import Kernel
from tilery.hardware.gpu import gpu
from tilery.languages import tensor_maps
from tilery.languages.cuda_source import Source
from tilery.languages.tensor_maps import TensorMapOf
from tilery.ops.attention.call import BackwardCall
from tilery.ops.attention.cuda.forward import columns, or_null, threads, window_left

_FILE = Path(__file__).with_name("attention_backward.cu")
_ONE_PASS_FILE = Path(__file__).with_name("attention_backward_one_pass.cu")
_DELTA, _PASS = Source(_FILE, "attention_delta"), Source(_FILE, "hopper_attention_backward")
_ONE_PASS = Source(_ONE_PASS_FILE, "hopper_attention_backward_one_pass")
_ROUND_DQ = Source(_ONE_PASS_FILE, "attention_round_dq")
_FAR = 2**29  # tokens and tiles are numbered in 32 bits
_MAX_HEAD = 128  # a thread keeps its part of dk and of dv in registers
_ALIGNMENT, _BARRIERS = 1024, 16  # bytes to align tiles, and of a stage's barriers
_MAX_STAGES = 4
_TILES_TOGETHER = 4  # of a head that share what they read in one pass


@dataclass(frozen=True)
class Config:
    dkdv_block_n: int  # keys of a tile, 64 for each warpgroup
    dkdv_block_m: int  # queries that stream past it, at a time
    dkdv_stages: int
    dq_block_m: int = 0  # queries of a tile, 64 for each warpgroup; 0 in one pass
    dq_block_n: int = 0  # keys that stream past it
    dq_stages: int = 0
    one_pass: bool = False  # the tiles of keys give dq too


# Tiles of both passes by the columns of a head, what is likely best first. With larger ones ptxas has too few registers
# to keep wgmmas in flight, and lets each end before the next begins.
_DKDV = {64: ((128, 80), (128, 64), (192, 32)), 128: ((128, 48), (128, 32))}
_DQ = {64: ((192, 80), (128, 128), (192, 64)), 128: ((128, 112), (128, 80), (192, 48), (128, 96))}
_DQ_SOFTCAP = {64: ((192, 64), (128, 96)), 128: ((128, 96), (128, 80), (192, 48))}  # it takes registers too
_ONE_PASS_PLAIN = {64: ((128, 96), (128, 128), (128, 64)), 128: ((128, 64), (128, 80), (128, 48))}
_ONE_PASS_SOFTCAP = {64: ((128, 96), (128, 64)), 128: ((128, 48), (128, 32))}
_TILES = {"dkdv": (_DKDV, _DKDV), "dq": (_DQ, _DQ_SOFTCAP), "one_pass": (_ONE_PASS_PLAIN, _ONE_PASS_SOFTCAP)}


class AttentionBackward(Kernel):
    archs = ("sm_90",)
    Config = Config

    def refusal(self, call: BackwardCall, config: Config | None = None) -> str | None:
        if call.q.dtype not in (torch.float16, torch.bfloat16):
            return f"multiplies fp16 and bf16 alone, got {dtype_name(call.q.dtype)}"
        if call.head_dim != call.value_dim or call.head_dim > _MAX_HEAD or call.head_dim % 16:
            sizes = f"multiples of 16 up to {_MAX_HEAD}"
            return f"heads of keys and values must be of one size, {sizes}, got {call.head_dim} and {call.value_dim}"
        tokens, pairs = max(call.tokens, call.key_tokens), _pairs(call, call.heads)
        if tokens >= _FAR or pairs * ceil_div(max(call.queries, call.keys), 64) >= _FAR:
            return f"numbers tokens and tiles up to {_FAR}, got {tokens} tokens in {pairs} heads"
        for name in ("q", "k", "v", "dout", "result"):
            x = getattr(call, name)
            sizes, strides = _view(call, x)
            if all(sizes) and (why := tensor_maps.heads_refusal(name, x, sizes, strides)):
                return why
        return None if config is None else self._config_refusal(call, config)

    def _config_refusal(self, call: BackwardCall, config: Config) -> str | None:
        dkdv, dq = (config.dkdv_block_n, config.dkdv_block_m), (config.dq_block_m, config.dq_block_n)
        if config.one_pass:
            if any(own := (*dq, config.dq_stages)):
                return f"dq has no tiles of its own in one pass: dq_block_m, dq_block_n, dq_stages must be 0, got {own}"
            return _tile_refusal(call, "one_pass", dkdv, config.dkdv_stages)
        why = _tile_refusal(call, "dkdv", dkdv, config.dkdv_stages)
        return why or _tile_refusal(call, "dq", dq, config.dq_stages)

    def default(self, call: BackwardCall) -> Config:
        return self.config(call, tiles(call, "dkdv")[0], tiles(call, "dq")[0])

    def config(self, call: BackwardCall, dkdv: tuple[int, int], dq: tuple[int, int]) -> Config:
        return Config(*dkdv, _most_stages(call, "dkdv", *dkdv), *dq, _most_stages(call, "dq", *dq))

    def one_pass(self, call: BackwardCall, tile: tuple[int, int]) -> Config:
        return Config(*tile, _most_stages(call, "one_pass", *tile), one_pass=True)

    def configs(self, call: BackwardCall) -> list[Config]:
        found = [self.config(call, dkdv, dq) for dkdv in tiles(call, "dkdv") for dq in tiles(call, "dq")]
        found += [self.one_pass(call, tile) for tile in tiles(call, "one_pass")]
        return [c for c in found if self.refusal(call, c) is None]

    def estimate(self, call: BackwardCall, config: Config) -> Work:
        """The work of the tiles of keys: four products, and in one pass all five."""
        seen = call.queries * call.group // (2 if call.causal else 1)
        blocks = call.batch * call.kv_heads * ceil_div(call.keys, config.dkdv_block_n)
        moved = (2 * config.dkdv_block_n + seen) * 2 * call.head_dim * call.q.dtype.itemsize
        products = 5 if config.one_pass else 4
        return Work(blocks, 2 * products * config.dkdv_block_n * seen * columns(call.head_dim), moved)

    def workspace(self, call: BackwardCall, config: Config) -> dict[str, TensorSpec]:
        sums = TensorSpec.contiguous(call.lse.shape, torch.float32, call.lse.device)
        found = {"delta": sums, "lse2": sums}
        if config.one_pass:
            blocks = _query_blocks(call, config.dkdv_block_m) * call.heads * (1 if call.packed else call.batch)
            size = config.dkdv_block_m * columns(call.head_dim)
            found["dq_sums"] = TensorSpec.contiguous((blocks, size), torch.float32, call.lse.device)
            found["dq_turns"] = TensorSpec.contiguous((blocks,), torch.int32, call.lse.device)
        return found

    def launches(self, call: BackwardCall, config: Config) -> list[Launch | Host]:
        if not call.tokens or not call.key_tokens:  # there is no map of nothing, and every gradient is zero
            return [Host(torch.Tensor.zero_, (x,)) for x in (call.dq, call.dk, call.dv) if all(x.shape)]
        q, k, v, dout = call.q, call.k, call.v, call.dout
        n, m, stages = config.dkdv_block_n, config.dkdv_block_m, config.dkdv_stages
        dkdv, outputs = _maps(call, n, m, (k, v), (q, dout)), {"out": call.dk, "out_v": call.dv}
        if config.one_pass:
            turns = math.prod(call.dq_turns.shape)
            return [_delta(call, call.dq_turns, turns), *_one_pass(call, outputs, dkdv, config)]
        found = [_delta(call), _pass(call, outputs | dkdv, n, m, stages, of_keys=True)]
        m, n = config.dq_block_m, config.dq_block_n
        dq = {"out": call.dq, "out_v": 0} | _maps(call, m, n, (q, dout), (k, v))
        return [*found, _pass(call, dq, m, n, config.dq_stages, of_keys=False)]


def tiles(call: BackwardCall, what: str) -> tuple[tuple[int, int], ...]:
    """Tiles of the pass for dk and dv ("dkdv"), of that for dq ("dq") or of one for all, what is likely best first."""
    plain, capped = _TILES[what]
    return (plain if call.softcap == 0 else capped)[columns(call.head_dim)]


def _tile_refusal(call: BackwardCall, what: str, tile: tuple[int, int], stages: int) -> str | None:
    known, name = tiles(call, what), {"dkdv": "dk and dv", "dq": "dq", "one_pass": "one pass"}[what]
    if tile not in known:
        said = ", ".join(f"{m} × {n}" for m, n in known)
        return f"tiles for {name} of heads of {call.head_dim} must be {said}, got {tile[0]} × {tile[1]}"
    most = _most_stages(call, what, *tile)
    if not 1 <= stages <= most:
        return f"stages for {name} must be 1 to {most} for shared memory to hold them, got {stages}"
    return None


def _shared_bytes(what: str, rows: int, step: int, stages: int, width: int) -> int:
    """Shared memory of a block that keeps so many rows of two tensors of 16 bits; `step` rows of two others stream."""
    held = _ALIGNMENT + 2 * rows * width * 2 + _BARRIERS + stages * _stage_bytes(what, step, width)
    if what == "one_pass":  # dS twice, a step's dq in fp32, and the barriers of that
        held += 2 * rows * step * 2 + step * width * 4 + 2 * _BARRIERS
    return held


def _stage_bytes(what: str, step: int, width: int) -> int:
    sums = 0 if what == "dq" else 2 * step * 4  # lse and delta
    return 2 * step * width * 2 + sums + _BARRIERS


def _most_stages(call: BackwardCall, what: str, rows: int, step: int) -> int:
    width = columns(call.head_dim)
    room = gpu(call.q.device).shared_per_block - _shared_bytes(what, rows, step, 0, width)
    return min(room // _stage_bytes(what, step, width), _MAX_STAGES)


def _query_blocks(call: BackwardCall, block: int) -> int:
    """Blocks of queries of a head that have sums of their own; packed sequences may begin inside of one."""
    return call.tokens // block + call.batch + 1 if call.packed else ceil_div(call.tokens, block)


def _delta(call: BackwardCall, counters: Any = 0, counter_count: int = 0) -> Launch:
    lanes = next_power_of_2(ceil_div(call.head_dim, 8))
    rows = call.tokens * call.heads * (1 if call.packed else call.batch)
    args = {
        "dout": call.dout, "out": call.result, "lse": call.lse, "dlse": or_null(call.dlse), "lse2": call.lse2,
        "delta": call.delta, **_strides(call, call.dout, "dout"), **_strides(call, call.result, "out"),
        "heads": call.heads, "tokens": call.tokens, "rows": rows, "counters": counters, "counter_count": counter_count,
    }  # fmt: skip
    constants = {"T": call.q.dtype, "HEAD_DIM": call.head_dim, "LANES": lanes}
    return Launch(_DELTA, ceil_div(rows, 256 // lanes), args, constants, {"threads": 256}, pdl=True)


def _pass(call: BackwardCall, own: dict[str, Any], rows: int, step: int, stages: int, of_keys: bool) -> Launch:
    args, grid = _params(call, rows, of_keys)
    constants = {
        "T": call.q.dtype, "HEAD_DIM": call.head_dim, "STEP": step, "WARPGROUPS": rows // 64, "STAGES": stages,
        "OF_KEYS": of_keys, "SOFTCAP": call.softcap > 0,
    }  # fmt: skip
    shared = _shared_bytes("dkdv" if of_keys else "dq", rows, step, stages, columns(call.head_dim))
    return Launch(_PASS, grid, args | own, constants, {"threads": threads(rows), "shared": shared}, pdl=True)


def _one_pass(call: BackwardCall, outputs: dict[str, Any], maps: dict[str, Any], config: Config) -> list[Launch]:
    """All gradients by tiles of keys, dq as sums in fp32; and dq rounded."""
    rows, step = config.dkdv_block_n, config.dkdv_block_m
    warpgroups, width, blocks = rows // 64, columns(call.head_dim), _query_blocks(call, step)
    names = zip(("k_map", "v_map", "q_map", "dout_map"), maps.values())
    sums = {"dq_sums": call.dq_sums, "dq_turns": call.dq_turns, "query_heads": call.heads, "query_blocks": blocks}
    args, grid = _params(call, rows, of_keys=True)
    args |= outputs | dict(names) | sums | {"pairs_per_group": min(_heads_together(call), args["pairs_per_group"])}
    constants = {"T": call.q.dtype, "HEAD_DIM": call.head_dim, "STEP": step, "WARPGROUPS": warpgroups}
    options = {"threads": threads(rows), "shared": _shared_bytes("one_pass", rows, step, config.dkdv_stages, width)}
    more = {"STAGES": config.dkdv_stages, "SOFTCAP": call.softcap > 0}
    first = Launch(_ONE_PASS, grid, args, constants | more, options, pdl=True)
    args, grid = _params(call, step, of_keys=False)
    args |= {"out": call.dq, "out_v": 0} | sums
    return [first, Launch(_ROUND_DQ, grid, args, constants, {"threads": warpgroups * 128}, pdl=True)]


def _heads_together(call: BackwardCall) -> int:
    """KV heads whose tiles take turns: as many as the L2 has room for, or as give each _TILES_TOGETHER tiles at a time.

    The more heads, the fewer tiles of one stand in line to add to its dq, but what they stream comes from memory.
    """
    device, width = gpu(call.q.device), columns(call.head_dim)
    of_head = (call.group * call.queries * (2 + 2 + 4) + call.keys * (2 + 2)) * width  # bytes of q, dout, dq, k and v
    return max(device.l2_for_reuse // max(of_head, 1), device.sms // _TILES_TOGETHER)


def _params(call: BackwardCall, rows: int, of_keys: bool) -> tuple[dict[str, Any], int]:
    """What kernels of tiles of keys, or of queries, are told besides their outputs; and how many tiles there are."""
    heads, longest = (call.kv_heads, call.keys) if of_keys else (call.heads, call.queries)
    tiles, pairs, sums = max(ceil_div(longest, rows), 1), _pairs(call, heads), call.lse_strides
    left = window_left(call.effective_window)
    args = {
        "lse2": call.lse2, "delta": call.delta, "cu_seqlens_q": or_null(call.cu_seqlens_q),
        "cu_seqlens_k": or_null(call.cu_seqlens_k), **_strides(call, call.dk if of_keys else call.dq, "out"),
        "sums_batch_stride": sums.sequence, "sums_head_stride": sums.head, "sequences": call.batch, "heads": heads,
        "heads_per_kv": call.group, "seqlen_q": call.tokens, "seqlen_k": call.key_tokens,
        "max_seqlen_q": call.queries, "max_seqlen_k": call.keys, "tiles_per_head": tiles, "pairs_per_group": pairs,
        "window_left": left, "window_right": 0 if call.causal else left, "softcap": call.softcap,
        "softmax_scale": call.softmax_scale,
    }  # fmt: skip
    return args, pairs * tiles


def _pairs(call: BackwardCall, heads: int) -> int:
    """Pairs of a sequence and a head; packed tokens of no sequence are a sequence too."""
    return (call.batch + call.packed) * heads


def _strides(call: BackwardCall, x: Any, name: str) -> dict[str, int]:
    return dict(zip((f"{name}_batch_stride", f"{name}_row_stride", f"{name}_head_stride"), call.strides(x)))


def _view(call: BackwardCall, x: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """x as [sequences, heads, tokens, values]: sizes, innermost first, and the strides of all but the values."""
    sequence, token, head = call.strides(x)
    of_keys = x is call.k or x is call.v
    tokens, heads = (call.key_tokens, call.kv_heads) if of_keys else (call.tokens, call.heads)
    return (call.head_dim, tokens, heads, 1 if call.packed else call.batch), (token, head, sequence)


def _maps(
    call: BackwardCall, rows: int, step: int, kept: tuple[Argument, Argument], streamed: tuple[Argument, Argument]
) -> dict[str, TensorMapOf]:
    boxes = zip(("a_map", "b_map", "c_map", "d_map"), (*kept, *streamed), (rows, rows, step, step))
    return {name: TensorMapOf(x, *_view(call, x), (box,)) for name, x, box in boxes}


attention_backward = AttentionBackward()
