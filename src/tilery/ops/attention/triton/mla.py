"""mla in Triton: a program per tile of queries of one head; keys, their turned part and values stream past it."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tilery.base.integers import ceil_div
from tilery.base.launch import Launch
from tilery.base.spec import Work
from tilery.core.kernel import Kernel
from tilery.hardware.gpu import ARCHS, HOPPER, gpu
from tilery.ops.attention.call import MlaCall
from tilery.ops.attention.triton import tiles
from tilery.ops.attention.triton.softmax import LOG2E, finish_softmax, key_range, online_softmax, visible
from tilery.ops.attention.triton.tiles import CuSeqlens, Tiles, fill_rows, load_rows, packed_span, scheduled

# A wgmma for every 16 keys, whose descriptors ptxas 12.8 adds to a register that it never sets where there are more
# than two and K and V lie at one place in shared memory, as they do where cp.async cannot load them. 13.0 does not.
_KEYS_OF_16_VALUES = 32


class SharedStrides(NamedTuple):
    """Strides of a tensor with one head for all."""

    sequence: int
    token: int


class Sizes(NamedTuple):
    queries: int  # of a sequence, or all packed tokens
    keys: int


@triton.jit
def _load_block(
    source, sequence, head, first_token, start, token_stride, n, inside,
    WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """A block of keys or values: from a pointer to the sequence's first, or by TMA, where that is `first_token`."""
    if TMA:  # past the end of a tensor it gives 0
        tile = source.load([sequence, head, first_token + start, 0]).reshape(BLOCK_N, WIDTH)
    else:
        source += tl.full((), 1, tl.int64) * start * token_stride  # past 2**31 elements int32 overflows
        at = source + (n[:, None] * token_stride + tl.arange(0, WIDTH)[None, :])
        tile = tl.load(at, mask=inside[:, None], other=0) if MASKED else tl.load(at)
    return tile


@triton.jit
def _mainloop(
    q, q_rope, acc, row_max, row_sum, k, k_rope, v, sequence, head, first_key, first, last, position, keys,
    k_token, k_rope_token, v_token, scale,
    D: tl.constexpr, R: tl.constexpr, E: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    MASKED: tl.constexpr, PACKED: tl.constexpr, TMA: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Keys from first to last, in blocks; without MASKED all of them are seen by all queries."""
    n = tl.arange(0, BLOCK_N).to(tl.int64) if FAR else tl.arange(0, BLOCK_N)
    for start in range(first, last, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        there = key < keys
        tile = _load_block(k, sequence, head, first_key, start, k_token, n, there, D, BLOCK_N, MASKED, TMA)
        scores = tl.dot(q, tl.trans(tile), input_precision="ieee")  # tf32 would lose 13 bits
        tile = _load_block(k_rope, sequence, 0, first_key, start, k_rope_token, n, there, R, BLOCK_N, MASKED, TMA)
        scores = tl.dot(q_rope, tl.trans(tile), scores, input_precision="ieee")
        if MASKED:
            scores = tl.where(visible(position, key, keys, 0, CAUSAL, False), scores, -float("inf"))
        row_max, row_sum, p, rescale = online_softmax(row_max, row_sum, scores, scale)
        tile = _load_block(v, sequence, head, first_key, start, v_token, n, there, E, BLOCK_N, MASKED, TMA)
        if (MASKED and PACKED) and TMA:  # the next sequence's values may be NaN, and 0 times that is too
            tile = tl.where(there[:, None], tile, tl.zeros_like(tile))
        acc = tl.dot(p.to(tile.dtype), tile, acc * rescale[:, None], input_precision="ieee")
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=("sequences", "longest_q", "longest_k", "tiles", "heads_together"))
def _mla(
    q_ptr, q_rope_ptr, k, k_rope, v, out_ptr,  # k, k_rope and v are pointers, or with TMA descriptors
    q_strides, q_rope_strides, k_strides, k_rope_strides, v_strides, out_strides, cu_seqlens, sizes,
    sequences, longest_q, longest_k, tiles, heads_together, scale,
    HEADS: tl.constexpr, D: tl.constexpr, R: tl.constexpr, E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, TMA: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    PACKED: tl.constexpr = cu_seqlens.q_ptr is not None
    tile, pair = scheduled((sequences + 1 if PACKED else sequences) * HEADS, tiles, heads_together, CAUSAL)
    wide = tl.full((), 1, tl.int64)
    sequence, head = pair // HEADS * wide, pair % HEADS * wide
    queries, keys = sizes.queries, sizes.keys
    out_ptr += head * out_strides.head
    if PACKED:  # queries and keys are all tokens
        begin_q, end_q, valid_q = packed_span(cu_seqlens.q_ptr, sequence, sequences, queries, longest_q)
        begin_k, end_k, valid_k = packed_span(cu_seqlens.k_ptr, sequence, sequences, keys, longest_k)
        unused, step = sequence == sequences, tiles * BLOCK_M
        if unused | (not (valid_q & valid_k)):
            first_row = begin_q + tile * BLOCK_M
            fill_rows(out_ptr, None, first_row, end_q, step, out_strides.token, unused, E, E, BLOCK_M)
            return
        queries, keys = end_q - begin_q, end_k - begin_k
        if tile * BLOCK_M >= queries:
            return
        sequence *= 0  # all tokens are one
        q_ptr += begin_q * wide * q_strides.token
        q_rope_ptr += begin_q * wide * q_rope_strides.token
        out_ptr += begin_q * wide * out_strides.token
    else:
        begin_k = 0
    q_ptr += sequence * q_strides.sequence + head * q_strides.head
    q_rope_ptr += sequence * q_rope_strides.sequence + head * q_rope_strides.head
    out_ptr += sequence * out_strides.sequence
    if not TMA:
        k += sequence * k_strides.sequence + head * k_strides.head + begin_k * wide * k_strides.token
        k_rope += sequence * k_rope_strides.sequence + begin_k * wide * k_rope_strides.token
        v += sequence * v_strides.sequence + head * v_strides.head + begin_k * wide * v_strides.token

    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    inside, far_rows = rows < queries, rows * wide
    q = load_rows(q_ptr, far_rows * q_strides.token, tl.arange(0, D), inside, D)
    q_rope = load_rows(q_rope_ptr, far_rows * q_rope_strides.token, tl.arange(0, R), inside, R)
    sign = tl.where(scale < 0, -1.0, 1.0).to(q.dtype)  # so that the largest score is the largest logit
    q, q_rope = q * sign, q_rope * sign
    scale = tl.maximum(tl.abs(scale) * LOG2E, 1e-30)  # 0 times -inf would be NaN

    first = tile * BLOCK_M + keys - queries
    last = tl.minimum(first + BLOCK_M, keys) - 1
    _, inner, outer, end = key_range(first, last, keys, 0, BLOCK_N, CAUSAL, False)
    row_max = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, E), tl.float32)
    for part in tl.static_range(2):  # keys that all see, then keys that not all see
        acc, row_max, row_sum = _mainloop(
            q, q_rope, acc, row_max, row_sum, k, k_rope, v, sequence.to(tl.int32), head.to(tl.int32), begin_k,
            inner if part == 0 else outer, outer if part == 0 else end, rows + keys - queries, keys,
            k_strides.token, k_rope_strides.token, v_strides.token, scale,
            D, R, E, BLOCK_N, CAUSAL, part == 1, PACKED, TMA, FAR,
        )  # fmt: skip
    inverse, _ = finish_softmax(row_max, row_sum)
    at = out_ptr + far_rows[:, None] * out_strides.token + tl.arange(0, E)[None, :]
    tl.store(at, (acc * inverse[:, None]).to(out_ptr.dtype.element_ty), mask=inside[:, None])


class Mla(Kernel):
    archs = ARCHS
    Config = Tiles

    def refusal(self, call: MlaCall, config: Tiles | None = None) -> str | None:
        if config is None:
            return None
        if why := tiles.size_refusal(config):
            return why
        if config.tma and (why := tiles.tma_refusal(call, "keys and values", call.k, call.k_rope, call.v)):
            return why
        if call.value_dim == 16 and config.block_n > _KEYS_OF_16_VALUES and not config.tma:
            return (
                f"block_n must be at most {_KEYS_OF_16_VALUES} where values have 16 columns and come by pointers: of "
                f"more, ptxas 12.8, which Triton brings, makes code that reads V from anywhere; got {config}"
            )
        streamed = config.num_stages * config.block_n * (call.head_dim + call.value_dim)
        need = (config.block_m * call.head_dim + streamed) * call.q.dtype.itemsize
        return tiles.shared_refusal(call.q, config, need)

    def default(self, call: MlaCall) -> Tiles:
        if call.q.dtype == torch.float32:
            return Tiles(16, 16, 4, 1)
        found = [Tiles(128, 32, 8, 2), Tiles(64, 32, 4, 2), Tiles(64, 32, 4, 1)]
        if gpu(call.q.device).number == HOPPER:  # others were not measured
            # 128 keys by pointers spill registers
            found = [Tiles(128, 128, 8, 2, tma=True), Tiles(128, 64, 8, 3), Tiles(128, 32, 8, 2)]
        return next(c for c in found if self.refusal(call, c) is None)

    def configs(self, call: MlaCall) -> list[Tiles]:
        if call.q.dtype == torch.float32:
            found = [Tiles(m, 16, 4, stages) for m in (16, 32) for stages in (1, 2)]
        else:
            sizes = ((64, 64, 4), (128, 64, 8), (128, 128, 8))
            found = [Tiles(*size, stages, tma) for size in sizes for stages in (2, 3) for tma in (False, True)]
            found.append(Tiles(64, 32, 4, 2))
        return [c for c in found if self.refusal(call, c) is None]

    def estimate(self, call: MlaCall, config: Tiles) -> Work:
        programs = call.batch * call.heads * ceil_div(call.queries, config.block_m)
        keys, width = call.keys_of_tile(config.block_n), call.head_dim + call.value_dim
        moved = (config.block_m + keys) * width * call.q.dtype.itemsize
        return Work(programs, 2 * config.block_m * keys * width, moved)

    def launches(self, call: MlaCall, config: Tiles) -> list[Launch]:
        count = ceil_div(call.queries, config.block_m)
        streamed = {"k": call.k, "k_rope": call.k_rope, "v": call.v}
        if config.tma:
            streamed = {name: tiles.descriptor(call, x, config.block_n) for name, x in streamed.items()}
        of_keys, of_rope, of_values = (call.strides(x) for x in (call.k, call.k_rope, call.v))
        args = {
            "q_ptr": call.q, "q_rope_ptr": call.q_rope, **streamed, "out_ptr": call.out,
            "q_strides": call.strides(call.q), "q_rope_strides": call.strides(call.q_rope), "k_strides": of_keys,
            "k_rope_strides": SharedStrides(of_rope.sequence, of_rope.token), "v_strides": of_values,
            "out_strides": call.strides(call.out), "cu_seqlens": CuSeqlens(call.cu_seqlens_q, call.cu_seqlens_k),
            "sizes": Sizes(call.tokens, call.key_tokens), "sequences": call.batch,
            "longest_q": call.queries, "longest_k": call.keys, "tiles": count,
            "heads_together": tiles.heads_in_l2(call), "scale": call.softmax_scale,
        }  # fmt: skip
        constants = {
            "HEADS": call.heads, "D": call.q.shape[-1], "R": call.rope_dim, "E": call.value_dim,
            "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "CAUSAL": call.causal, "TMA": config.tma,
            "FAR": tiles.far(of_keys.token, of_rope.token, of_values.token),
        }  # fmt: skip
        pairs = (call.batch + call.packed) * call.heads  # packed tokens of no sequence are a sequence too
        return [Launch(_mla, pairs * count, args, constants, config.options)]


mla = Mla()
