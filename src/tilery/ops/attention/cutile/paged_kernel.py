"""The cuTile kernels of attention_decode and mla_decode: rows of one key head against a split of the keys; `combine`.

Rows are query tokens of a sequence times heads that share keys. How a sequence is split depends on its own length and
the config alone, never on the batch: it gives the same bits in any. A split's result for a row is its online softmax
and the sum of P · values, all fp32: partial_out [splits, rows, E] and partial_stats [2, splits, rows], with all rows
B · Q · H.
"""

import cuda.tile as ct

from tilery.ops.attention.cutile.softmax import LOG2E, begin_softmax, finish_softmax, online_softmax

_ZERO = ct.PaddingMode.ZERO
_NAN = float("nan")


def _split(lengths, k, table, b, PAGE, SPLITS, CHUNK):
    """The keys of sequence b, and how many of them a split has; then 0, or NaN where the length is none that may be."""
    max_keys = k.shape[1] if PAGE == 0 else table.shape[1] * PAGE
    given = ct.load(lengths, (b,), (1,)).item()
    length = min(max(given, 0), max_keys)
    return length, max(ct.cdiv(ct.cdiv(length, SPLITS), CHUNK), 1) * CHUNK, ct.where(given == length, 0.0, _NAN)


def _pages(table, k, b, j, length, PAGE, N):
    """Pages of the cache that hold the N keys of tile j; nothing of the table past the sequence's end is read.

    A page that the cache does not have becomes one that it has. The tile's first key of such a page is given too, or
    the length where there is none: no row is at that position, so rows at positions before it see no such key.
    """
    pages, end = b, length
    if PAGE >= N:
        page = ct.gather(table, (b, j * N // PAGE))
        pages = max(min(page, k.shape[0] - 1), 0)
        end = ct.where(page == pages, length, j * N)
    elif PAGE > 0:
        each = j * (N // PAGE) + ct.arange(N // PAGE, dtype=ct.int32)
        page = ct.gather(table, (b, each), mask=each * PAGE < length)
        pages = ct.maximum(ct.minimum(page, k.shape[0] - 1), 0)
        end = ct.min(ct.where(page == pages, length, each * PAGE)).item()
    return pages, end


def _load_tile(x, pages, j, kv_head, PAGE, N, D):
    """Tile j of a sequence's keys or values, [N, D]."""
    if PAGE == 0:
        tile = ct.load(x, (pages, j, kv_head, 0), (1, N, 1, D), padding_mode=_ZERO)
    elif PAGE >= N:
        tile = ct.load(x, (pages, j % (PAGE // N), kv_head, 0), (1, N, 1, D), padding_mode=_ZERO)
    else:
        where = pages, ct.Slice(0, PAGE), ct.Slice(kv_head, 1), ct.Slice(0, D)
        tile = ct.load_advanced_indexing(x, where, padding_mode=_ZERO)
    return tile.reshape((N, D))


def _step(
    q, q_rope, k, k_rope, v, table, b, kv_head, j, length, position, scale, row_max, row_sum, acc,
    D, ROPE, N, PAGE, KEYS_ARE_VALUES, MASKED,
):  # fmt: skip
    """Tile j of the keys. Rows that see one of a page that the cache does not have become NaN."""
    pages, end = _pages(table, k, b, j, length, PAGE, N)
    keys = _load_tile(k, pages, j, kv_head, PAGE, N, D)
    scores = ct.mma(q, keys.transpose(), ct.zeros((q.shape[0], N), ct.float32))
    if ROPE > 0:
        rope = _load_tile(k_rope, pages, j, kv_head, PAGE, N, ROPE)
        scores = ct.mma(q_rope, rope.transpose(), scores)
    scores = scores * scale
    values = keys if KEYS_ARE_VALUES else _load_tile(v, pages, j, kv_head, PAGE, N, D)
    if MASKED:
        key = j * N + ct.arange(N, dtype=ct.int32)
        scores = ct.where(key.reshape((1, N)) <= position, scores, float("-inf"))
        there = ct.arange(N, dtype=ct.int32).reshape((N, 1)) < end - j * N
        values = ct.where(there, values, ct.zeros((N, D), values.dtype))  # what is not there may be NaN
    row_max, row_sum, p, rescale = online_softmax(row_max, row_sum, scores, 1.0)
    if PAGE > 0:
        row_sum = ct.where(position < end, row_sum, _NAN)
    return row_max, row_sum, ct.mma(p.astype(values.dtype), values, acc * rescale)


@ct.kernel
def paged_attention(
    q, q_rope, k, k_rope, v, lengths, table, out, lse, partial_out, partial_stats, scale,
    D: ct.Constant[int], ROPE: ct.Constant[int], TOKENS: ct.Constant[int], HEADS: ct.Constant[int],
    N: ct.Constant[int], TAIL: ct.Constant[int], PAGE: ct.Constant[int], SPLITS: ct.Constant[int],
    LAUNCHED_SPLITS: ct.Constant[int], KEYS_ARE_VALUES: ct.Constant[bool], LSE: ct.Constant[bool],
):  # fmt: skip
    queries, kv_heads, group = q.shape[1], q.shape[2], q.shape[3]
    tokens, heads = ct.cdiv(queries, TOKENS), ct.cdiv(group, HEADS)
    # Blocks run together that read the keys of all heads, which lie side by side.
    tile, kv_head = divmod(ct.bid(0), kv_heads)
    split, tile = divmod(tile, tokens * heads)
    b, split = divmod(split, LAUNCHED_SPLITS)
    token, head = divmod(tile, heads)
    length, size, wrong = _split(lengths, k, table, b, PAGE, SPLITS, N)
    low, high = split * size, min(split * size + size, length)
    if (low < length) | (LAUNCHED_SPLITS == 1):
        where = b, token, kv_head, head, 0
        q_tile = ct.load(q, where, (1, TOKENS, 1, HEADS, D), padding_mode=_ZERO).reshape((TOKENS * HEADS, D))
        rope_tile = q_tile
        if ROPE > 0:
            rope_tile = ct.load(q_rope, where, (1, TOKENS, 1, HEADS, ROPE), padding_mode=_ZERO)
            rope_tile = rope_tile.reshape((TOKENS * HEADS, ROPE))
        first = length - queries + token * TOKENS
        position = first + ct.arange(TOKENS * HEADS, dtype=ct.int32).reshape((TOKENS * HEADS, 1)) // HEADS
        scale = scale * LOG2E
        row_max, row_sum = begin_softmax(TOKENS * HEADS)
        acc = ct.zeros((TOKENS * HEADS, D), ct.float32)
        start = low // N
        outer = max(min(high, first + 1) // N, start)  # tiles before it are seen by all rows
        for j in range(start, outer):
            row_max, row_sum, acc = _step(
                q_tile, rope_tile, k, k_rope, v, table, b, kv_head, j, length, position, scale, row_max, row_sum, acc,
                D, ROPE, N, PAGE, KEYS_ARE_VALUES, False,
            )  # fmt: skip
        for j in range(outer * (N // TAIL), ct.cdiv(high, TAIL)):
            row_max, row_sum, acc = _step(
                q_tile, rope_tile, k, k_rope, v, table, b, kv_head, j, length, position, scale, row_max, row_sum, acc,
                D, ROPE, TAIL, PAGE, KEYS_ARE_VALUES, True,
            )  # fmt: skip
        row = (1, TOKENS, 1, HEADS)
        if LAUNCHED_SPLITS == 1:
            inverse, logsum = finish_softmax(row_max, row_sum + wrong)
            ct.store(out, where, (acc * inverse).astype(out.dtype).reshape((1, TOKENS, 1, HEADS, D)))
            if LSE:
                # Without TMA, which may write behind a single row; partial_stats has more than one.
                ct.store(lse, (b, token, kv_head, head), logsum.reshape(row), allow_tma=False)
        else:
            batch = q.shape[0]
            at = split * batch + b
            ct.store(partial_out, (at, token, kv_head, head, 0), acc.reshape((1, TOKENS, 1, HEADS, D)))
            ct.store(partial_stats, (at, token, kv_head, head), row_max.reshape(row))
            ct.store(partial_stats, (LAUNCHED_SPLITS * batch + at, token, kv_head, head), row_sum.reshape(row))


@ct.kernel
def combine(
    partial_out, partial_stats, lengths, k, table, out, lse,
    QUERIES: ct.Constant[int], HEADS: ct.Constant[int], N: ct.Constant[int], PAGE: ct.Constant[int],
    SPLITS: ct.Constant[int], BLOCK_SPLITS: ct.Constant[int], PIECE: ct.Constant[int], LSE: ct.Constant[bool],
):  # fmt: skip
    """A block takes PIECE values of one row of the results of all splits."""
    row, piece = divmod(ct.bid(0), ct.num_tiles(out, 1, (1, PIECE)))
    b, rest = divmod(row, QUERIES * HEADS)
    token, head = divmod(rest, HEADS)
    length, size, wrong = _split(lengths, k, table, b, PAGE, SPLITS, N)
    live = ct.arange(BLOCK_SPLITS, dtype=ct.int32).reshape((BLOCK_SPLITS, 1)) * size < length
    one = (1, BLOCK_SPLITS, 1)
    maxima = ct.load(partial_stats, (0, 0, row), one, padding_mode=_ZERO, allow_tma=False).reshape((BLOCK_SPLITS, 1))
    sums = ct.load(partial_stats, (1, 0, row), one, padding_mode=_ZERO, allow_tma=False).reshape((BLOCK_SPLITS, 1))
    found = ct.load(partial_out, (0, row, piece), (BLOCK_SPLITS, 1, PIECE), padding_mode=_ZERO, allow_tma=False)
    maxima = ct.where(live, maxima, float("-inf"))
    row_max = ct.max(maxima, axis=0, keepdims=True)
    rescale = ct.exp2(maxima - ct.where(row_max == float("-inf"), 0.0, row_max))
    row_sum = ct.sum(ct.where(live, sums, 0.0) * rescale, axis=0, keepdims=True)
    acc = ct.sum(ct.where(live, found.reshape((BLOCK_SPLITS, PIECE)), 0.0) * rescale, axis=0, keepdims=True)
    inverse, logsum = finish_softmax(row_max, row_sum + wrong)
    ct.store(out, (row, piece), (acc * inverse).astype(out.dtype), allow_tma=False)
    if LSE and piece == 0:
        ct.store(lse, (b, head, token), logsum.reshape((1, 1, 1)), allow_tma=False)
