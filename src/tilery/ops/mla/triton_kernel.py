"""A program per tile of queries of one head; keys, their turned part and values stream past it."""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tilery.base.spec import Artifact, TensorSpec, Work
from tilery.hardware import device
from tilery.languages import triton_glue
from tilery.ops.mla import outputs, problem, problem_of_run
from tilery.parts.attention import Problem, pairs
from tilery.parts.heads import heads
from tilery.parts.triton_attention import LOG2E, finish, key_range, online, placed, seen
from tilery.parts.triton_attention_forward import bounds, put_rows, tile_of_rows
from tilery.parts.triton_attention_plan import L2, Config, archs
from tilery.parts.triton_tiles import far

__all__ = ["Config", "archs", "compile", "configs", "default", "estimate", "refusal", "run"]


def refusal(*specs: Any, config: Config | None = None) -> str | None:
    if config is None:
        return None
    if any(size < 16 or size & (size - 1) for size in (config.block_m, config.block_n)):
        return f"blocks must be powers of two from 16 on, got {config}"
    if config.tma and (why := _tma_refusal(*specs[2:5], layout=specs[-3])):
        return why
    p = problem(outputs(*specs), specs)
    limit = device.shared_limit(device.arch(p.q.device))
    streamed = config.num_stages * config.block_n * (p.size + p.value)
    need = (config.block_m * p.size + streamed) * p.q.dtype.itemsize
    return f"{config} needs {need} bytes of shared memory, a block has {limit}" if need > limit else None


def _tma_refusal(*streamed: TensorSpec, layout: str) -> str | None:
    """Of k, k_rope and v. The interpreter takes it too."""
    arch = device.arch(streamed[0].device)
    if arch != "cpu" and int(arch.removeprefix("sm_")) < 90:
        return f"TMA is there from sm_90 on, this is {arch}"
    for x in streamed:
        if not all(x.shape):
            return "TMA takes no empty tensors"
        if not all(_matrices(x, layout)[1]):
            return "TMA takes no heads or sequences that are one in memory"
        if not x.aligned or any(step * x.dtype.itemsize % 16 for step in _matrices(x, layout)[1]):
            return "TMA takes keys and values that begin at multiples of 16 bytes"
    return None


def default(*specs: Any) -> Config:
    if specs[0].dtype == torch.float32:
        return Config(16, 16, 4, 1)
    found = [Config(128, 32, 8, 2), Config(64, 32, 4, 2), Config(64, 32, 4, 1)]
    if device.arch(specs[0].device) == "sm_90":
        found = [Config(128, 128, 8, 2, tma=True), Config(128, 64, 8, 3)]  # 128 keys by pointers spill registers
    return next(c for c in found if refusal(*specs, config=c) is None)


def configs(*specs: Any) -> list[Config]:
    if specs[0].dtype == torch.float32:
        found = [Config(m, 16, 4, stages) for m in (16, 32) for stages in (1, 2)]
    else:
        sizes = ((64, 64, 4), (128, 64, 8), (128, 128, 8))
        found = [Config(*size, stages, tma) for size in sizes for stages in (2, 3) for tma in (False, True)]
        found.append(Config(64, 32, 4, 2))
    return [c for c in found if refusal(*specs, config=c) is None]


def estimate(*specs: Any, config: Config) -> Work:
    """Of a tile in the middle of its sequence: causal ones see half of the keys, about."""
    p = problem(outputs(*specs), specs)
    tiles = p.batch * p.heads * triton.cdiv(p.queries, config.block_m)
    there = pairs(p.queries, p.keys, p.causal, 0)
    keys = min(p.keys, triton.cdiv(there, max(p.queries, 1)) + config.block_n)
    width = p.size + p.value
    return Work(tiles, 2 * config.block_m * keys * width, (config.block_m + keys) * width * p.q.dtype.itemsize)


@triton.jit
def _fetched(
    source, sequence, head, token, start, row, n, there,
    WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """A block of keys or values: from a pointer to the sequence's first, or by TMA, where that is `token`."""
    if TMA:  # past the end of a tensor it gives 0
        tile = source.load([sequence, head, token + start, 0]).reshape(BLOCK_N, WIDTH)
    else:
        source += tl.full((), 1, tl.int64) * start * row  # past 2**31 elements int32 overflows
        at = source + (n[:, None] * row + tl.arange(0, WIDTH)[None, :])
        tile = tl.load(at, mask=there[:, None], other=0) if MASKED else tl.load(at)
    return tile


@triton.jit
def _span(
    q, q_rope, acc, top, total, k, k_rope, v, sequence, head, token, first, last, place_of, keys,
    k_row, k_rope_row, v_row, scale,
    D: tl.constexpr, R: tl.constexpr, E: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    MASKED: tl.constexpr, PACKED: tl.constexpr, TMA: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Keys from first to last, in blocks; without MASKED all of them are seen by all queries."""
    n = tl.arange(0, BLOCK_N).to(tl.int64) if FAR else tl.arange(0, BLOCK_N)
    for start in range(first, last, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        there = key < keys
        tile = _fetched(k, sequence, head, token, start, k_row, n, there, D, BLOCK_N, MASKED, TMA)
        scores = tl.dot(q, tl.trans(tile), input_precision="ieee")  # tf32 would lose 13 bits
        tile = _fetched(k_rope, sequence, 0, token, start, k_rope_row, n, there, R, BLOCK_N, MASKED, TMA)
        scores = tl.dot(q_rope, tl.trans(tile), scores, input_precision="ieee")
        if MASKED:
            scores = tl.where(seen(place_of, key, keys, 0, CAUSAL, False), scores, -float("inf"))
        top, total, weights, shrink = online(top, total, scores, scale)
        tile = _fetched(v, sequence, head, token, start, v_row, n, there, E, BLOCK_N, MASKED, TMA)
        if (MASKED and PACKED) and TMA:  # the next sequence's values may be NaN, and 0 times that is too
            tile = tl.where(there[:, None], tile, tl.zeros_like(tile))
        acc = tl.dot(weights.to(tile.dtype), tile, acc * shrink[:, None], input_precision="ieee")
    return acc, top, total


@triton.jit(do_not_specialize=("sequences", "most_q", "most_k", "tiles", "band"))
def _mla(
    q_ptr, q_rope_ptr, k, k_rope, v, out_ptr, cu_q_ptr, cu_k_ptr, sequences, queries, keys, most_q, most_k,
    tiles, band,
    q_batch, q_row, q_head, q_rope_batch, q_rope_row, q_rope_head, k_batch, k_row, k_head, k_rope_batch, k_rope_row,
    v_batch, v_row, v_head, out_batch, out_row, out_head, scale,
    HEADS: tl.constexpr, D: tl.constexpr, R: tl.constexpr, E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, TMA: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    tile, pair = placed((sequences if cu_q_ptr is None else sequences + 1) * HEADS, tiles, band, CAUSAL)
    wide = tl.full((), 1, tl.int64)
    sequence, head = pair // HEADS * wide, pair % HEADS * wide
    out_ptr += head * out_head
    if cu_q_ptr is not None:  # queries and keys are all tokens
        begin_q, end_q, sound_q = bounds(cu_q_ptr, sequence, sequences, queries, most_q)
        begin_k, end_k, sound_k = bounds(cu_k_ptr, sequence, sequences, keys, most_k)
        left, step = sequence == sequences, tiles * BLOCK_M
        if left | (not (sound_q & sound_k)):
            put_rows(out_ptr, None, begin_q + tile * BLOCK_M, end_q, step, out_row, left, E, E, BLOCK_M)
            return
        queries, keys = end_q - begin_q, end_k - begin_k
        if tile * BLOCK_M >= queries:
            return
        sequence *= 0  # all tokens are one
        q_ptr += begin_q * wide * q_row
        q_rope_ptr += begin_q * wide * q_rope_row
        out_ptr += begin_q * wide * out_row
    else:
        begin_k = 0
    q_ptr += sequence * q_batch + head * q_head
    q_rope_ptr += sequence * q_rope_batch + head * q_rope_head
    out_ptr += sequence * out_batch
    if not TMA:
        k += sequence * k_batch + head * k_head + begin_k * wide * k_row
        k_rope += sequence * k_rope_batch + begin_k * wide * k_rope_row
        v += sequence * v_batch + head * v_head + begin_k * wide * v_row

    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    inside, far_rows = rows < queries, rows * wide
    q = tile_of_rows(q_ptr, far_rows * q_row, tl.arange(0, D), inside, D)
    q_rope = tile_of_rows(q_rope_ptr, far_rows * q_rope_row, tl.arange(0, R), inside, R)
    sign = tl.where(scale < 0, -1.0, 1.0).to(q.dtype)  # so that the largest score is the largest logit
    q, q_rope = q * sign, q_rope * sign
    scale = tl.maximum(tl.abs(scale) * LOG2E, 1e-30)  # of 0 times -inf there would be NaN

    first = tile * BLOCK_M + keys - queries
    last = tl.minimum(first + BLOCK_M, keys) - 1
    _, inner, outer, end = key_range(first, last, keys, 0, BLOCK_N, CAUSAL, False)
    top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, E), tl.float32)
    for part in tl.static_range(2):  # keys that all see, then keys that not all see
        acc, top, total = _span(
            q, q_rope, acc, top, total, k, k_rope, v, sequence.to(tl.int32), head.to(tl.int32), begin_k,
            inner if part == 0 else outer, outer if part == 0 else end,
            rows + keys - queries, keys, k_row, k_rope_row, v_row, scale,
            D, R, E, BLOCK_N, CAUSAL, part == 1, cu_q_ptr is not None, TMA, FAR,
        )  # fmt: skip
    share, _ = finish(top, total)
    at = out_ptr + far_rows[:, None] * out_row + tl.arange(0, E)[None, :]
    tl.store(at, (acc * share[:, None]).to(out_ptr.dtype.element_ty), mask=inside[:, None])


def _matrices(x: Any, layout: str) -> tuple[list[int], list[int]]:
    """Sequences, heads and tokens of keys or values, and the strides along them; of one alone any will do."""
    sequences, tokens, count, size, (batch, row, head) = heads(x, layout)
    shape = [sequences, count, tokens]
    return shape, [size if n == 1 else step for n, step in zip(shape, (batch, head, row))]


def _descriptor(x: Any, block: int, layout: str) -> Any:
    tile = (1, 1, block, x.shape[-1])
    if isinstance(x, TensorSpec):
        return triton_glue.Descriptor(x, tile, None)
    shape, steps = _matrices(x, layout)
    return TensorDescriptor(x, [*shape, x.shape[-1]], [*steps, 1], list(tile))


def _call(p: Problem, config: Config, q_rope, k_rope, layout: str):
    """Grid, arguments and constants; of tensors for `run` and of specs for `compile`."""
    packed, tiles = p.cu_q is not None, triton.cdiv(p.queries, config.block_m)
    turned_q, turned_k = heads(q_rope, layout).strides, heads(k_rope, layout).strides
    tokens = (p.q.shape[0], p.k.shape[0]) if packed else (p.queries, p.keys)
    band = max(L2 // (max(p.keys, 1) * (p.size + p.value) * p.q.dtype.itemsize), 1)
    streamed = [_descriptor(x, config.block_n, layout) if config.tma else x for x in (p.k, k_rope, p.v)]
    arguments = (
        p.q, q_rope, *streamed, p.out, p.cu_q, p.cu_k, p.batch, *tokens, p.queries, p.keys, tiles, band,
        *p.q_strides, *turned_q, *p.k_strides, *turned_k[:2], *p.v_strides, *p.out_strides, p.scale,
    )  # fmt: skip
    constants = {
        "HEADS": p.heads, "D": p.q.shape[-1], "R": q_rope.shape[-1], "E": p.value,
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "CAUSAL": p.causal, "TMA": config.tma,
        "FAR": far(p.k_strides[1], turned_k[1], p.v_strides[1]),
    }  # fmt: skip
    return ((p.batch + packed) * p.heads * tiles,), arguments, constants


def compile(specs, config: Config, arch: str) -> Artifact:
    _, q_rope, _, k_rope, *_, layout, _, _ = specs
    _, arguments, constants = _call(problem(outputs(*specs), specs), config, q_rope, k_rope, layout)
    return triton_glue.legacy_compile(_mla, arguments, constants, config.options, arch)


def run(outs, args, config: Config) -> None:
    _, q_rope, _, k_rope, *_, layout, _, _ = args
    grid, arguments, constants = _call(problem_of_run(outs, args), config, q_rope, k_rope, layout)
    _mla[grid](*arguments, **constants, **config.options)
