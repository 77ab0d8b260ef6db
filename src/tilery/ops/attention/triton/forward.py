"""attention and attention_lse in Triton: a program per tile of queries of one head.

Blocks of keys that every query of the tile sees are taken without masks; those at the edges of what is causal, in the
window or there at all come with masks. Heads whose size is no power of two lie in tiles that are, with zeros behind:
with two tiles, 80 as 64 and 16, ptxas 12.8 made code that was wrong.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from tilery.base.integers import ceil_div, next_power_of_2
from tilery.base.launch import Argument, Launch
from tilery.base.spec import Work, dtype_name
from tilery.core.kernel import Kernel
from tilery.hardware.gpu import ARCHS
from tilery.ops.attention.call import AttentionCall
from tilery.ops.attention.triton import arguments, tiles
from tilery.ops.attention.triton.arguments import Fp8Scales, Scoring, Sizes
from tilery.ops.attention.triton.softmax import (
    LOG2E,
    begin_softmax,
    finish_softmax,
    key_range,
    logits,
    online_softmax,
    visible,
)
from tilery.ops.attention.triton.tiles import CuSeqlens, Tiles, fill_rows, load_rows, packed_span, scheduled
from tilery.ops.quantize.triton_fp8 import native, widen


@triton.jit
def _operand(x, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """A tile of q or k as the tensor cores take it: fp8 that is not NATIVE to them comes as bytes, and becomes fp16."""
    if FORMAT != "none" and not NATIVE:
        x = widen(x, FORMAT, False).to(tl.float16)
    return x


@triton.jit
def _values(x, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """A tile of v; fp8 becomes fp16 always, so that P keeps eleven bits."""
    return _operand(x, FORMAT, NATIVE).to(tl.float16) if FORMAT != "none" else x


@triton.jit
def _load_block(
    source, sequence, head, start, first_token, token_stride, n, inside,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """A block of keys or values of SIZE, from a pointer to the first one or, by TMA, a descriptor of all of them."""
    if TMA:  # past the ends of a tensor it gives 0
        tile = source.load([sequence, head, first_token + start, 0]).reshape(BLOCK_N, WIDTH)
    else:
        source += tl.full((), 1, tl.int64) * start * token_stride  # past 2**31 elements int32 overflows
        columns = tl.arange(0, WIDTH)
        at = source + (n[:, None] * token_stride + columns[None, :])
        if WIDTH > SIZE:
            there = (columns < SIZE)[None, :]
            tile = tl.load(at, mask=inside[:, None] & there if MASKED else there, other=0.0)
        else:
            tile = tl.load(at, mask=inside[:, None], other=0.0) if MASKED else tl.load(at)
    return tile


@triton.jit
def _mainloop(
    q, acc, row_max, row_sum, k, v, key_mask_ptr, bias_ptr, slope, sequence, kv_head, first_key,
    first, inner, outer, last, position, rows, queries, keys, k_token, v_token, key_mask, bias, scoring, scale,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_N: tl.constexpr,
    FORMAT: tl.constexpr, NATIVE: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    SCALE_FIRST: tl.constexpr, ALIBI: tl.constexpr, MASKED: tl.constexpr, EDGES: tl.constexpr, TMA: tl.constexpr,
    FAR: tl.constexpr,
):  # fmt: skip
    """Keys from first to last, in blocks, all of which all queries see unless they are MASKED.

    EDGES: those from inner to outer are seen by all, the others not: one loop, so that the loads never run dry.
    """
    n = tl.arange(0, BLOCK_N)
    wide = tl.full((), 1, tl.int64)
    far_n = n * wide if FAR else n
    for start in range(first, last, BLOCK_N):
        key = start + n
        there = key < keys
        tile = _load_block(
            k, sequence, kv_head, start, first_key, k_token, far_n, there, HEAD_DIM, D, BLOCK_N, MASKED, TMA
        )
        scores = tl.dot(q, tl.trans(_operand(tile, FORMAT, NATIVE)), input_precision="ieee")  # tf32 would lose 13 bits
        if SCALE_FIRST:
            scores = logits(scores, scale, scoring.softcap, SOFTCAP)
        if ALIBI:
            scores += slope * (key[None, :] - position[:, None]).to(tl.float32)
        if bias_ptr is not None:
            inside = (rows[:, None] < queries) & there[None, :]
            at = bias_ptr + (rows[:, None] * wide * bias.query + key[None, :] * wide * bias.key)
            scores += tl.load(at, mask=inside, other=0.0).to(tl.float32) * LOG2E
        if EDGES:
            if (start < inner) | (start >= outer):
                scores = tl.where(visible(position, key, keys, scoring.window, CAUSAL, WINDOW), scores, -float("inf"))
        elif MASKED:
            scores = tl.where(visible(position, key, keys, scoring.window, CAUSAL, WINDOW), scores, -float("inf"))
        if key_mask_ptr is not None:
            seen = tl.load(key_mask_ptr + key * wide * key_mask.key, mask=there, other=0)
            scores = tl.where(seen[None, :] != 0, scores, -float("inf"))
        row_max, row_sum, p, rescale = online_softmax(row_max, row_sum, scores, 1.0 if SCALE_FIRST else scale)
        tile = _load_block(
            v, sequence, kv_head, start, first_key, v_token, far_n, there, VALUE_DIM, E, BLOCK_N, MASKED, TMA
        )
        if MASKED and TMA:  # the next sequence's values may be NaN, and 0 times that is too
            tile = tl.where(there[:, None], tile, tl.zeros_like(tile))
        tile = _values(tile, FORMAT, NATIVE)
        p = p.to(tile.dtype)
        acc = tl.dot(p, tile, acc * rescale[:, None], input_precision="ieee")
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=["sequences", "longest_q", "longest_k", "tiles", "heads_together"])
def _forward(
    q, k, v, out,  # pointers, or with TMA descriptors; out of packed sequences is a pointer always
    q_strides, k_strides, v_strides, out_strides, lse, key_mask, bias, scoring, fp8_scales, cu_seqlens, sizes,
    sequences, longest_q, longest_k, tiles, heads_together,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SCALE_FIRST: tl.constexpr,
    TMA: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    heads, queries, keys, scale = sizes.heads, sizes.queries, sizes.keys, scoring.scale
    PACKED: tl.constexpr = cu_seqlens.q_ptr is not None
    tile, pair = scheduled((sequences + 1 if PACKED else sequences) * heads, tiles, heads_together, CAUSAL)
    wide = tl.full((), 1, tl.int64)
    sequence, head = pair // heads * wide, pair % heads * wide
    lse_ptr = lse.ptr
    if lse_ptr is not None:
        lse_ptr += head * lse.head
    if PACKED:  # queries and keys are all tokens
        begin_q, end_q, valid_q = packed_span(cu_seqlens.q_ptr, sequence, sequences, queries, longest_q)
        begin_k, end_k, valid_k = packed_span(cu_seqlens.k_ptr, sequence, sequences, keys, longest_k)
        unused, step = sequence == sequences, tiles * BLOCK_M
        if unused | (not (valid_q & valid_k)):
            out_head, first_row = out + head * out_strides.head, begin_q + tile * BLOCK_M
            fill_rows(out_head, lse_ptr, first_row, end_q, step, out_strides.token, unused, VALUE_DIM, E, BLOCK_M)
            return
        queries, keys = end_q - begin_q, end_k - begin_k
        if tile * BLOCK_M >= queries:
            return
        k_start, v_start = wide * begin_k * k_strides.token, wide * begin_k * v_strides.token
        q_start, out_start = wide * begin_q * q_strides.token, wide * begin_q * out_strides.token
        lse_start = wide * begin_q
        sequence *= 0  # all tokens are one
    else:
        k_start, v_start = sequence * k_strides.sequence, sequence * v_strides.sequence
        q_start, out_start = sequence * q_strides.sequence, sequence * out_strides.sequence
        lse_start = sequence * lse.sequence
        begin_q, begin_k = 0, 0

    near_sequence, near_head, kv_head = sequence.to(tl.int32), head.to(tl.int32), head // GROUP
    first_row = begin_q + tile * BLOCK_M
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    inside, far_rows = rows < queries, rows * wide
    if TMA:  # rows past a sequence's end are read, and not written
        q_tile = q.load([near_sequence, near_head, first_row, 0]).reshape(BLOCK_M, D)
    else:
        q += q_start + head * q_strides.head
        q_tile = load_rows(q, far_rows * q_strides.token, tl.arange(0, D), inside, HEAD_DIM)
        k += k_start + kv_head * k_strides.head
        v += v_start + kv_head * v_strides.head
    q_tile = _operand(q_tile, FORMAT, NATIVE)
    if FORMAT != "none":
        scale *= tl.load(fp8_scales.q_ptr) * tl.load(fp8_scales.k_ptr)
    if not SCALE_FIRST:
        scale *= LOG2E  # it is positive, so the largest score is the largest logit
    slope = 0.0
    if scoring.slopes_ptr is not None:
        slope = tl.load(scoring.slopes_ptr + head).to(tl.float32) * LOG2E
    key_mask_ptr, bias_ptr = key_mask.ptr, bias.ptr
    if key_mask_ptr is not None:
        key_mask_ptr += sequence * key_mask.sequence
    if bias_ptr is not None:
        bias_ptr += sequence * bias.sequence + head * bias.head

    position = rows + keys - queries
    first = tile * BLOCK_M + keys - queries
    last = tl.minimum(first + BLOCK_M, keys) - 1
    start, inner, outer, end = key_range(first, last, keys, scoring.window, BLOCK_N, CAUSAL, WINDOW)
    row_max, row_sum = begin_softmax(scoring.sinks_ptr, head, BLOCK_M)
    acc = tl.zeros((BLOCK_M, E), tl.float32)
    tail = outer
    if TMA:  # a packed sequence's last block of keys is not its alone
        tail = tl.minimum(tl.cdiv(end, BLOCK_N), keys // BLOCK_N) * BLOCK_N if PACKED else end
        tail = tl.maximum(tail, start)
    # 0: keys that a window cuts, 1: keys that all see, 2: keys that not all see; by TMA 3, all in one loop, and for
    # packed sequences 2, the tail.
    FIRST: tl.constexpr = 3 if TMA else (0 if WINDOW else 1)
    LAST: tl.constexpr = (1 if PACKED else 2) if TMA else 3
    for part in tl.static_range(FIRST, LAST, -1 if TMA else 1):
        acc, row_max, row_sum = _mainloop(
            q_tile, acc, row_max, row_sum, k, v, key_mask_ptr, bias_ptr, slope,
            near_sequence, kv_head.to(tl.int32), begin_k,
            inner if part == 1 else (tail if part == 2 else start), inner, outer,
            inner if part == 0 else (outer if part == 1 else (end if part == 2 else tail)),
            position, rows, queries, keys, k_strides.token, v_strides.token, key_mask, bias, scoring, scale,
            HEAD_DIM, VALUE_DIM, D, E, BLOCK_N, FORMAT, NATIVE, CAUSAL, WINDOW, SOFTCAP, SCALE_FIRST,
            scoring.slopes_ptr is not None, part == 0 or part == 2, part == 3, TMA, FAR,
        )  # fmt: skip

    inverse, lse_rows = finish_softmax(row_max, row_sum)
    if FORMAT != "none":
        inverse *= tl.load(fp8_scales.v_ptr)
    acc *= inverse[:, None]
    if TMA and not PACKED:
        out.store([near_sequence, near_head, first_row, 0], acc.to(out.dtype).reshape(1, 1, BLOCK_M, E))
    else:
        at = out + out_start + head * out_strides.head + far_rows[:, None] * out_strides.token
        column = tl.arange(0, E)[None, :]
        tl.store(at + column, acc.to(out.dtype.element_ty), mask=inside[:, None] & (column < VALUE_DIM))
    if lse_ptr is not None:
        tl.store(lse_ptr + lse_start + rows, lse_rows, mask=inside)


class Attention(Kernel):
    """attention and attention_lse, which differ in whether the call has an lse."""

    archs = ARCHS
    Config = Tiles

    def refusal(self, call: AttentionCall, config: Tiles | None = None) -> str | None:
        if config is None:
            return None
        if why := tiles.size_refusal(config):
            return why
        if config.tma and (why := tiles.tma_refusal(call, "queries, keys and values", call.k, call.q, call.v)):
            return why
        return tiles.shared_refusal(call.q, config, self._shared(call, config))

    def _shared(self, call: AttentionCall, config: Tiles) -> int:
        """The tile of queries, and what comes in stages: keys, values, the bias."""
        head_dim, value_dim = next_power_of_2(call.head_dim), next_power_of_2(call.value_dim)
        streamed = config.num_stages * config.block_n * (head_dim + value_dim) * call.q.dtype.itemsize
        if call.bias is not None:
            streamed += config.num_stages * config.block_m * config.block_n * call.bias.dtype.itemsize
        return int(config.block_m * head_dim * call.q.dtype.itemsize + streamed)

    def default(self, call: AttentionCall) -> Tiles:
        return next(c for c in self._preferred(call) if self.refusal(call, c) is None)

    def _preferred(self, call: AttentionCall) -> list[Tiles]:
        """Best first; where shared memory is short, later ones fit. What is usual spills no registers."""
        large = call.head_dim > 128
        if call.q.dtype == torch.float32:
            return [Tiles(16 if call.head_dim > 64 else 32, 32, 4, 2), Tiles(16, 16, 4, 1)]
        if call.is_fp8 and not native(call.q.device):
            return [Tiles(128, 32, 8, 2), Tiles(64, 32, 8, 1)]  # widening takes registers
        queries, warps = (64, 4) if call.queries <= 64 else (128, 8)
        keys = 64 if large or call.bias is not None else 128
        extras = call.bias, call.slopes, call.key_mask, call.cu_seqlens_q
        plain = not call.is_fp8 and call.softcap == 0 and all(x is None for x in extras)
        # Two of them fit an SM; what is more than plain would spill.
        small = [Tiles(*((64, 128) if call.head_dim <= 64 else (128, 64)), 4, 2, tma=True)]
        return [
            *(small if plain and not large and call.queries > 64 else []),
            *(Tiles(queries, keys, warps, stages, tma=True) for stages in (3, 2)),
            Tiles(64, 64, 8, 2) if large else Tiles(queries, 64, warps, 2),
            Tiles(64, 32, 8, 2),
            Tiles(32, 32, 4, 1),
        ]

    def configs(self, call: AttentionCall) -> list[Tiles]:
        if call.q.dtype == torch.float32:
            sizes = [(16, 32, 4), (32, 16, 4), (32, 32, 4), (32, 32, 8)]
            found = [Tiles(*size, 2) for size in sizes]
        else:
            sizes = [(64, 64, 4), (64, 128, 4), (128, 64, 8), (128, 128, 8)]
            sizes += [(128, 64, 4)] if call.value_dim <= 128 else []  # larger ones spill
            sizes += [(128, 128, 4)] if call.value_dim <= 64 else []
            found = [Tiles(*size, stages, tma=True) for size in sizes for stages in (2, 3, 4)]
            found += [Tiles(*size, stages) for size in ((64, 32, 4), (64, 64, 4), (128, 64, 8)) for stages in (2, 3)]
        return [c for c in found if self.refusal(call, c) is None]

    def estimate(self, call: AttentionCall, config: Tiles) -> Work:
        programs = call.batch * call.heads * ceil_div(call.queries, config.block_m)
        keys, width = call.keys_of_tile(config.block_n), call.head_dim + call.value_dim
        moved = (config.block_m + keys) * width * call.q.dtype.itemsize
        return Work(programs, 2 * config.block_m * keys * width, moved)

    def launches(self, call: AttentionCall, config: Tiles) -> list[Launch]:
        count = ceil_div(call.queries, config.block_m)
        pairs = (call.batch + call.packed) * call.heads  # packed tokens of no sequence are a sequence too
        args = {
            **_operands(call, config),
            "q_strides": call.strides(call.q), "k_strides": call.strides(call.k), "v_strides": call.strides(call.v),
            "out_strides": call.strides(call.out), "lse": arguments.lse(call),
            "key_mask": arguments.key_mask(call), "bias": arguments.bias(call),
            "scoring": Scoring(
                call.softmax_scale, call.effective_window, float(call.softcap), call.slopes, call.sinks
            ),
            "fp8_scales": Fp8Scales(call.q_scale, call.k_scale, call.v_scale),
            "cu_seqlens": CuSeqlens(call.cu_seqlens_q, call.cu_seqlens_k),
            "sizes": Sizes(call.heads, call.tokens, call.key_tokens), "sequences": call.batch,
            "longest_q": call.queries, "longest_k": call.keys, "tiles": count,
            "heads_together": min(call.group * tiles.heads_in_l2(call), pairs),
        }  # fmt: skip
        constants = {
            "GROUP": call.group, "HEAD_DIM": call.head_dim, "VALUE_DIM": call.value_dim,
            "D": next_power_of_2(call.head_dim), "E": next_power_of_2(call.value_dim),
            "BLOCK_M": config.block_m, "BLOCK_N": config.block_n,
            "FORMAT": dtype_name(call.q.dtype) if call.is_fp8 else "none",
            "NATIVE": call.is_fp8 and native(call.q.device),
            "CAUSAL": call.causal, "WINDOW": call.effective_window > 0, "SOFTCAP": call.softcap != 0,
            "SCALE_FIRST": _scale_first(call), "TMA": config.tma,
            "FAR": tiles.far(call.strides(call.k).token, call.strides(call.v).token),
        }  # fmt: skip
        return [Launch(_forward, pairs * count, args, constants, config.options)]


def _operands(call: AttentionCall, config: Tiles) -> dict[str, Any]:
    """q, k, v and out: pointers, or descriptors for TMA. It cannot write a part of a tile."""
    q, k, v = (_known(x) for x in (call.q, call.k, call.v))
    if not config.tma:
        return {"q": q, "k": k, "v": v, "out": call.out}
    return {
        "q": tiles.descriptor(call, q, config.block_m),
        "k": tiles.descriptor(call, k, config.block_n),
        "v": tiles.descriptor(call, v, config.block_n),
        "out": call.out if call.packed else tiles.descriptor(call, call.out, config.block_m),
    }


def _known(x: Argument) -> Argument:
    """The tensor, as bytes where it is fp8 and Triton does not know that."""
    return x._replace(dtype=torch.uint8) if x.dtype.itemsize == 1 and not native(x.device) else x


def _scale_first(call: AttentionCall) -> Any:
    """Whether logits are made before their maximum is found.

    Otherwise the kernel scales as it takes exponentials. Then the largest score must be that of the largest logit, so a
    scale that is not positive, which only a call tells, has code of its own.
    """
    if call.softcap != 0 or any(x is not None for x in (call.q_scale, call.bias, call.slopes)):
        return True
    return call.scale_is_positive.then(lambda positive: not positive)


attention = Attention()
