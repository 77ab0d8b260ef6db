"""Rows that wait in registers in pieces: a row of 5120 is five blocks of 1024, not one of 8192 with a third masked.

Triton's blocks are powers of two. All pieces of a row have the same size and the same layout, so what a thread has of
them is added up in its own registers, and threads meet once for the sum of a row.
"""

from typing import NamedTuple

import triton
import triton.language as tl

_PER_WARP = 256  # values of a piece: eight a lane, one access of 16 bytes in bf16
_WARPS = (2, 4, 8, 16)
_SHORT = 1024  # rows up to which one block does
_MANY, _ALONE = 8, 3  # most pieces of a default: 64 values a lane, or 24
MOST = 16  # of any config
_EARLY_WARPS = 4  # of a block that lets the next kernel start: see `pdl_launch_dependents`


class Cut(NamedTuple):
    block: int  # columns of a piece
    num_warps: int
    pieces: int


def cuts(n: int) -> list[Cut]:
    """How a row of n may be cut, with eight values a lane in each piece."""
    found = (Cut(warps * _PER_WARP, warps, triton.cdiv(n, warps * _PER_WARP)) for warps in _WARPS)
    return [c for c in found if 2 <= c.pieces <= MOST]


def cut(n: int, resident: bool, alone: bool) -> Cut | None:
    """The pieces that cover a row of n most closely; None where one block leaves no more lanes idle.

    `resident`: all programs run at once, and the next kernel waits for them to let it start. `alone`: an SM has few of
    them, so that more warps with fewer values each hide latency.
    """
    if n <= _SHORT:
        return None
    most = [(c, _ALONE if alone and c.num_warps < _WARPS[-1] else _MANY) for c in cuts(n)]
    found = [c for c, pieces in most if 3 <= c.pieces <= pieces and (c.num_warps >= _EARLY_WARPS or not resident)]
    best = min(found, key=lambda c: (c.block * c.pieces, c.pieces), default=None)
    whole = triton.next_power_of_2(n)
    return best if best and 17 * best.block * best.pieces <= 16 * whole else None


@triton.jit
def inside_piece(i: tl.constexpr, cols, inside, n, PIECES: tl.constexpr):
    """Which values of piece `i` exist, of rows that are `inside`: all but the last are full."""
    if i == PIECES - 1:
        return inside & (i * cols.shape[-1] + cols < n)
    return inside & tl.full(cols.shape, True, tl.int1)


@triton.jit
def load_pieces(ptr, cols, inside, n, other, PIECES: tl.constexpr):
    """A tuple of pieces, as they lie in memory; `cols` are the columns of the first."""
    held = ()
    for i in tl.static_range(PIECES):
        mask = inside_piece(i, cols, inside, n, PIECES)
        held = held + (tl.load(ptr + i * cols.shape[-1] + cols, mask=mask, other=other),)
    return held
