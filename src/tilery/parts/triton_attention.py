"""Pieces of Triton kernels for attention: scores become base-2 logits, are masked by place and summed as they come.

A running softmax of rows is (top, total): the largest logit so far, and the sum of 2 ** (logit - top). Logits are those
of the op times log2(e), so that exp2 serves; `finish` gives the lse as a natural logarithm again.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def placed(pairs, tiles, band, CAUSAL: tl.constexpr):
    """The tile of this program, and its pair of a sequence and a head: so many heads run together, in a band."""
    before = tl.program_id(0) // (band * tiles) * band  # heads of bands that began before
    height = tl.minimum(pairs - before, band)
    tile, pair = tl.program_id(0) % (band * tiles) // height, before + tl.program_id(0) % (band * tiles) % height
    if CAUSAL:
        tile = tiles - 1 - tile  # those that see most keys first
    return tile, pair


@triton.jit
def packed_span(first, last, sequence, tokens, most):
    """Start and end of a packed sequence, inside of the tokens whatever its numbers say, and whether they are sound.

    A sequence that is not, or that has more than `most` tokens, is cut: see attention_indices.py.
    """
    start = tl.where(sequence > 0, tl.minimum(tl.maximum(first, 0), tokens), 0)
    end = tl.minimum(tl.maximum(last, start), tokens)
    return start, end, (start == first) & (end == last) & (end - start <= most)


@triton.jit
def base_2(scale):
    """The factor from scores to base-2 logits; a scale of 0 is made tiny, so that -inf stays what it is."""
    return tl.where(scale == 0, 1e-30, scale * LOG2E)


@triton.jit
def bent(scores, scale, softcap, SOFTCAP: tl.constexpr):
    """Base-2 logits of scores: softcap · tanh(scale · scores / softcap), or scale · scores without SOFTCAP."""
    if SOFTCAP:
        small = tl.exp2(tl.abs(scores * scale) * (-2.0 * LOG2E) / softcap)
        tanh = (1.0 - small) / (1.0 + small)
        scores = tl.where(scores * scale < 0, -tanh, tanh) * (softcap * LOG2E)
    else:
        scores = scores * (scale * LOG2E)
    return scores


@triton.jit
def seen(place, key, keys, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Which of the keys [N] the queries at places [M] see, as [M, N]; there are `keys` of them."""
    kept = key[None, :] < keys
    if CAUSAL:
        kept = kept & (key[None, :] <= place[:, None])
    if WINDOW:
        kept = kept & (place[:, None] - key[None, :] < window)
        if not CAUSAL:
            kept = kept & (key[None, :] - place[:, None] < window)
    return kept


@triton.jit
def key_range(first, last, keys, window, BLOCK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Of queries at places first to last: blocks of keys from start to end hold all that any of them sees.

    Those from inner to outer are seen by all of them and need no mask. start, inner, outer are multiples of BLOCK.
    """
    start, inner, end, outer = 0, 0, keys, keys
    if CAUSAL:
        end, outer = tl.minimum(keys, last + 1), tl.minimum(keys, first + 1)
    elif WINDOW:
        end, outer = tl.minimum(keys, last + window), tl.minimum(keys, first + window)
    if WINDOW:
        start, inner = tl.maximum(first - window + 1, 0), tl.maximum(last - window + 1, 0)
        start, inner = start // BLOCK * BLOCK, tl.cdiv(inner, BLOCK) * BLOCK
    end, outer = tl.maximum(end, 0), tl.maximum(outer, 0)
    if WINDOW:
        end = tl.maximum(end, start)
        inner = tl.minimum(inner, tl.cdiv(end, BLOCK) * BLOCK)
    return start, inner, tl.maximum(outer // BLOCK * BLOCK, inner), end


@triton.jit
def begin(sinks_ptr, head, ROWS: tl.constexpr):
    """(top, total) of rows that have seen nothing but the head's sink, if sinks are given."""
    sink, there = -float("inf"), 0.0
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
        there = tl.where(sink == -float("inf"), 0.0, 1.0)
    return tl.zeros((ROWS,), tl.float32) + sink, tl.zeros((ROWS,), tl.float32) + there


@triton.jit
def online(top, total, scores, scale):
    """Adds a block of scores, logits of scores · scale with scale > 0; masked ones are -inf.

    Gives top, total, the block's weights [M, N], and the factor [M] by which earlier sums shrink.
    """
    best = tl.maximum(top, tl.max(scores, 1) * scale)
    safe = tl.where(best == -float("inf"), 0.0, best)  # a row that sees nothing yet
    weights = tl.exp2(scores * scale - safe[:, None])
    shrink = tl.exp2(top - safe)
    return best, total * shrink + tl.sum(weights, 1), weights, shrink


@triton.jit
def finish(top, total):
    """The factor that makes sums an average, 0 for rows that saw nothing, and their lse."""
    share = tl.where(total == 0, 0.0, 1.0 / tl.where(total == 0, 1.0, total))
    return share, (top + tl.log2(total)) * LN2
