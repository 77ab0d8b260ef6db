"""attention_backward in CUDA C++ for Hopper, by TMA and wgmma: tiles, and the launches of attention_backward.cu.

Three launches: delta and lse in base 2; dk and dv by tiles of keys; dq by tiles of queries. Both passes multiply S and
dP anew, seven products where five would do, so that no two blocks add to one sum.
"""

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
_DELTA, _PASS = Source(_FILE, "attention_delta"), Source(_FILE, "hopper_attention_backward")
_FAR = 2**29  # tokens and tiles are numbered in 32 bits
_MAX_HEAD = 128  # a thread keeps its part of dk and of dv in registers
_ALIGNMENT, _BARRIERS = 1024, 16  # bytes to align tiles, and of a stage's barriers
_MAX_STAGES = 4


@dataclass(frozen=True)
class Config:
    dkdv_block_n: int  # keys of a tile, 64 for each warpgroup
    dkdv_block_m: int  # queries that stream past it, at a time
    dkdv_stages: int
    dq_block_m: int  # queries of a tile, 64 for each warpgroup
    dq_block_n: int  # keys that stream past it
    dq_stages: int


# Tiles of both passes by the columns of a head, what is likely best first. With larger ones ptxas has too few registers
# to keep wgmmas in flight, and lets each end before the next begins.
_DKDV = {64: ((128, 80), (128, 64), (192, 32)), 128: ((128, 48), (128, 32))}
_DQ = {64: ((192, 80), (128, 128), (192, 64)), 128: ((128, 112), (128, 80), (192, 48), (128, 96))}
_DQ_SOFTCAP = {64: ((192, 64), (128, 96)), 128: ((128, 96), (128, 80), (192, 48))}  # it takes registers too


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
        for what, tile, stages in (
            ("dk and dv", (config.dkdv_block_n, config.dkdv_block_m), config.dkdv_stages),
            ("dq", (config.dq_block_m, config.dq_block_n), config.dq_stages),
        ):
            of_keys = what != "dq"
            known = tiles(call, of_keys)
            if tile not in known:
                said = ", ".join(f"{m} × {n}" for m, n in known)
                return f"tiles for {what} of heads of {call.head_dim} must be {said}, got {tile[0]} × {tile[1]}"
            most = _most_stages(call, *tile, of_keys=of_keys)
            if not 1 <= stages <= most:
                return f"stages for {what} must be 1 to {most} for shared memory to hold them, got {stages}"
        return None

    def default(self, call: BackwardCall) -> Config:
        return self.config(call, tiles(call, True)[0], tiles(call, False)[0])

    def config(self, call: BackwardCall, dkdv: tuple[int, int], dq: tuple[int, int]) -> Config:
        stages = _most_stages(call, *dkdv, of_keys=True), _most_stages(call, *dq, of_keys=False)
        return Config(*dkdv, stages[0], *dq, stages[1])

    def configs(self, call: BackwardCall) -> list[Config]:
        found = [self.config(call, dkdv, dq) for dkdv in tiles(call, True) for dq in tiles(call, False)]
        return [c for c in found if self.refusal(call, c) is None]

    def estimate(self, call: BackwardCall, config: Config) -> Work:
        """The work of the pass for dk and dv, which has four of the seven products."""
        seen = call.queries * call.group // (2 if call.causal else 1)
        blocks = call.batch * call.kv_heads * ceil_div(call.keys, config.dkdv_block_n)
        moved = (2 * config.dkdv_block_n + seen) * 2 * call.head_dim * call.q.dtype.itemsize
        return Work(blocks, 8 * config.dkdv_block_n * seen * columns(call.head_dim), moved)

    def workspace(self, call: BackwardCall, config: Config) -> dict[str, TensorSpec]:
        sums = TensorSpec.contiguous(call.lse.shape, torch.float32, call.lse.device)
        return {"delta": sums, "lse2": sums}

    def launches(self, call: BackwardCall, config: Config) -> list[Launch | Host]:
        if not call.tokens or not call.key_tokens:  # there is no map of nothing, and every gradient is zero
            return [Host(torch.Tensor.zero_, (x,)) for x in (call.dq, call.dk, call.dv) if all(x.shape)]
        q, k, v, dout = call.q, call.k, call.v, call.dout
        n, m = config.dkdv_block_n, config.dkdv_block_m
        dkdv = {"out": call.dk, "out_v": call.dv} | _maps(call, n, m, (k, v), (q, dout))
        found = [_delta(call), _pass(call, dkdv, n, m, config.dkdv_stages, of_keys=True)]
        m, n = config.dq_block_m, config.dq_block_n
        dq = {"out": call.dq, "out_v": 0} | _maps(call, m, n, (q, dout), (k, v))
        return [*found, _pass(call, dq, m, n, config.dq_stages, of_keys=False)]


def tiles(call: BackwardCall, of_keys: bool) -> tuple[tuple[int, int], ...]:
    """Tiles of the pass for dk and dv, or of that for dq, what is likely best first."""
    known = _DKDV if of_keys else _DQ if call.softcap == 0 else _DQ_SOFTCAP
    return known[columns(call.head_dim)]


def _shared_bytes(rows: int, step: int, stages: int, width: int, of_keys: bool) -> int:
    """Shared memory of a block that keeps so many rows of two tensors of 16 bits; `step` rows of two others stream."""
    return _ALIGNMENT + 2 * rows * width * 2 + _BARRIERS + stages * _stage_bytes(step, width, of_keys)


def _stage_bytes(step: int, width: int, of_keys: bool) -> int:
    sums = 2 * step * 4 if of_keys else 0  # lse and delta
    return 2 * step * width * 2 + sums + _BARRIERS


def _most_stages(call: BackwardCall, rows: int, step: int, of_keys: bool) -> int:
    device, width = gpu(call.q.device), columns(call.head_dim)
    room = device.shared_per_block - device.reserved_shared - _shared_bytes(rows, step, 0, width, of_keys)
    return min(room // _stage_bytes(step, width, of_keys), _MAX_STAGES)


def _delta(call: BackwardCall) -> Launch:
    lanes = next_power_of_2(ceil_div(call.head_dim, 8))
    rows = call.tokens * call.heads * (1 if call.packed else call.batch)
    args = {
        "dout": call.dout, "out": call.result, "lse": call.lse, "dlse": or_null(call.dlse), "lse2": call.lse2,
        "delta": call.delta, **_strides(call, call.dout, "dout"), **_strides(call, call.result, "out"),
        "heads": call.heads, "tokens": call.tokens, "rows": rows,
    }  # fmt: skip
    constants = {"T": call.q.dtype, "HEAD_DIM": call.head_dim, "LANES": lanes}
    return Launch(_DELTA, ceil_div(rows, 256 // lanes), args, constants, {"threads": 256}, pdl=True)


def _pass(call: BackwardCall, own: dict[str, Any], rows: int, step: int, stages: int, of_keys: bool) -> Launch:
    heads, longest = (call.kv_heads, call.keys) if of_keys else (call.heads, call.queries)
    tiles, sums, left = max(ceil_div(longest, rows), 1), call.lse_strides, window_left(call.effective_window)
    args = own | {
        "lse2": call.lse2, "delta": call.delta, "cu_seqlens_q": or_null(call.cu_seqlens_q),
        "cu_seqlens_k": or_null(call.cu_seqlens_k), **_strides(call, call.dk if of_keys else call.dq, "out"),
        "sums_batch_stride": sums.sequence, "sums_head_stride": sums.head, "sequences": call.batch, "heads": heads,
        "heads_per_kv": call.group, "seqlen_q": call.tokens, "seqlen_k": call.key_tokens,
        "max_seqlen_q": call.queries, "max_seqlen_k": call.keys, "tiles_per_head": tiles, "window_left": left,
        "window_right": 0 if call.causal else left, "softcap": call.softcap, "softmax_scale": call.softmax_scale,
    }  # fmt: skip
    constants = {
        "T": call.q.dtype, "HEAD_DIM": call.head_dim, "STEP": step, "WARPGROUPS": rows // 64, "STAGES": stages,
        "OF_KEYS": of_keys, "SOFTCAP": call.softcap > 0,
    }  # fmt: skip
    shared = _shared_bytes(rows, step, stages, columns(call.head_dim), of_keys)
    options = {"threads": threads(rows), "shared": shared}
    return Launch(_PASS, _pairs(call, heads) * tiles, args, constants, options, pdl=True)


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
