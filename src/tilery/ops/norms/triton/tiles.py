"""How Triton kernels of norms cut rows: a program takes a few short rows, or a long one, `block` columns at a time.

Softmax has its pieces from here too. A row that a block or a few pieces hold stays in registers and is read once. A
longer one is read block by block: for its mean, if it is centred; for its squares; and to be written.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from tilery.base.rows import rows
from tilery.base.spec import TensorSpec
from tilery.hardware.gpu import gpu

_WARPS = (1, 2, 4, 8, 16, 32)
_MANY_WARPS = 16  # of a long row
_LONGEST_KEPT = 32768  # values in the registers of 16 warps: 64 of 255 a lane, the rest are weights and addresses
_VALUES_PER_LANE = 128
_L1_TAKEN = 19 * 1024  # bytes of L1 and shared memory that do not cache rows: 208 of an H200's 227 KiB do
_L1_BLOCK = 4096  # of a row that is read again from the L1 cache, so that registers are left for more programs
_PIECE_PER_WARP = 256  # values of a piece: eight a lane, one access of 16 bytes in bf16
_PIECE_WARPS = (2, 4, 8, 16)
_WHOLE = 4096  # a row up to this length is one block: 8192 × 3584 on an H200 took 29.2 µs so, 29.9 in pieces
_PIECE_REGISTERS = 72  # of a lane, for all pieces of a row
MOST_PIECES = 16


@dataclass(frozen=True)
class Config:
    """A program takes `rows` rows, `block` columns at a time; `pieces` of them wait in registers."""

    rows: int
    block: int
    num_warps: int
    pieces: int = 1


LONG_ROW = Config(1, 8192, 32)  # 512 × 65536 on an H200: 41.6 µs, 46.4 with 16384 and 16 warps
LONG_SUM = Config(1, 16384, 16)  # add_rms_norm of as many: 74.6 µs, 79.2 with 8192 and 32 warps


def refusal(config: Config | None, least_block: int = 1) -> str | None:
    if config is None:
        return None
    if config.block < least_block:
        return f"block must be {least_block} or more, got {config.block}"
    for name, size in (("rows", config.rows), ("block", config.block)):
        if size < 1 or size & (size - 1):
            return f"{name} must be a power of two, got {size}"
    if config.num_warps not in _WARPS:
        return f"num_warps must be one of {', '.join(map(str, _WARPS))}, got {config.num_warps}"
    if not 1 <= config.pieces <= MOST_PIECES:
        return f"pieces must be 1 to {MOST_PIECES}, got {config.pieces}"
    lane = _VALUES_PER_LANE // (4 if config.num_warps > _MANY_WARPS else 1)  # of 64 registers
    values, most = config.rows * config.block * config.pieces, 32 * config.num_warps * lane
    return f"tile of {values} values does not fit the registers of {config.num_warps} warps" if values > most else None


class Cut(NamedTuple):
    """A row in pieces."""

    block: int  # columns of a piece
    num_warps: int
    pieces: int


@dataclass(frozen=True)
class Tiling:
    """What a kernel does with its rows, which decides how they are cut."""

    inputs: int = 1  # tensors with rows that it reads
    one_sum: bool = False  # it needs one sum of a row before it can write, no more
    least_block: int = 1
    longest_kept: int = _LONGEST_KEPT  # row in registers
    long: Config = LONG_ROW  # for longer rows
    in_pieces: bool = False  # its rows may wait in several blocks
    wide: int = _LONGEST_KEPT + 1  # where rows are many and this long, a lane holds twice as much

    def default(self, x: TensorSpec) -> Config:
        """Sixteen values a lane; eight where each is an access of its own, with an address and a mask, or rows are few.

        Several short rows are one program's as long as that leaves many programs. Rows that would leave much of a block
        empty wait in pieces of it: rms_norm of 8192 × 5120 took 41.8 µs so on an H200, 54.4 read twice in blocks of
        4096. Of others, many long rows of which one sum must be known are read in blocks, twice, the second time from
        L1: 32768 × 8192 took 255 µs so, 261 in registers.
        """
        return (None if self._cut(x) else self._read_again(x)) or self._read_once(x)

    def configs(self, x: TensorSpec) -> list[Config]:
        """The default first, then what is near it, then shorter blocks."""
        base, n = self._read_once(x), x.shape[-1]
        warps = [Config(base.rows, base.block, w, base.pieces) for w in (base.num_warps // 2, base.num_warps * 2)]
        counts = [Config(c, base.block, _warps(c * base.block, n)) for c in (1, base.rows * 4) if base.pieces == 1]
        shorter = [Config(1, b, w) for b in (2048, 4096, 8192, 16384) if self.least_block <= b < n for w in (4, 8, 16)]
        pieces = [Config(1, *cut) for cut in cuts(n) if self.in_pieces and cut.block >= self.least_block]
        found = dict.fromkeys((self.default(x), base, *warps, *counts, *pieces, *shorter))
        return [c for c in found if refusal(c) is None and c.rows * c.block * c.pieces <= self.longest_kept]

    def constants(self, x: TensorSpec, config: Config) -> dict[str, Any]:
        """Constants of a kernel: READ says where its weights, or the row's second reading, come from.

        "early": weights are read before the sums of the row are known. "late": after. "again": the row is longer
        than its pieces, and read again from L1. "long": it is too long for L1.
        """
        m, n, _ = rows(x)
        pieces = max(triton.cdiv(n, config.block), 1)
        if pieces > config.pieces:
            pieces, read = 1, "again" if _l1_rows(x, self.inputs) >= 2 else "long"
        else:
            read = "early" if triton.cdiv(m, config.rows) <= _hiding(x) else "late"
        return {"ROWS": config.rows, "BLOCK": config.block, "PIECES": pieces, "READ": read}

    def _read_again(self, x: TensorSpec) -> Config | None:
        """For many long rows of which L1 holds those of all programs on an SM: two of 32 warps, four of 16 or more."""
        m, n, _ = rows(x)
        whole = triton.next_power_of_2(n)
        if not (self.one_sum and m > _hiding(x) and m * n >= 2**22 and n >= 4096):
            return None
        fitting = _l1_rows(x, self.inputs)
        if fitting >= 4:
            block = min(whole // 2, _L1_BLOCK)
            return Config(1, block, block // 256)
        if fitting >= 2 and n > 2 * _L1_BLOCK:
            return Config(1, 2 * _L1_BLOCK, _WARPS[-1])
        return None

    def _read_once(self, x: TensorSpec) -> Config:
        """The row in registers, if they hold it."""
        m, n, _ = rows(x)
        block, count = max(triton.next_power_of_2(max(n, 1)), self.least_block), 1
        if block > self.longest_kept:
            return Config(1, min(self.long.block, self.longest_kept), self.long.num_warps)
        cut = self._cut(x)
        if cut is not None:
            return Config(1, *cut)
        while 2 * count * block <= 2048 and m >= 512 * count:
            count *= 2
        # One waits while others work: of two inputs 512 × 8192 took 9.6 µs on an H200 with eight warps, 10.3 with
        # sixteen.
        values_per_warp = 1024 if n >= self.wide and m > _hiding(x) // 2 else 512
        return Config(count, block, _warps(count * block, n, values_per_warp, few=m <= _hiding(x)))

    def _cut(self, x: TensorSpec) -> Cut | None:
        found = cut(x.shape[-1], x.dtype.itemsize) if self.in_pieces else None
        return found if found and found.block >= self.least_block else None


def _hiding(x: TensorSpec) -> int:
    """Programs past which one waits while others work: weights loaded early would only take registers."""
    return 4 * gpu(x.device).sms


def _l1_rows(x: TensorSpec, inputs: int) -> int:
    """How many rows L1 holds at a time."""
    return (gpu(x.device).shared_per_block - _L1_TAKEN) // max(x.shape[-1] * x.dtype.itemsize * inputs, 1)


def _warps(values: int, n: int, values_per_warp: int = 512, few: bool = False) -> int:
    """`few`: 1 × 1024 on an H200 takes 1.25 µs with four warps, 1.31 with two."""
    each = values_per_warp if n % 8 == 0 else 256
    return min(max(values // each, min(values // 256, 4) if few else 1, 1), _MANY_WARPS)


# Rows in pieces: a row of 5120 is three blocks of 2048, not one of 8192 with a third masked. Triton's blocks are powers
# of two. All pieces of a row have the same size and layout, so what a thread has of them is added up in its own
# registers, and threads meet once for the sum of a row.


def cuts(n: int) -> list[Cut]:
    """How a row of n may be cut, with eight values a lane in each piece."""
    found = (Cut(warps * _PIECE_PER_WARP, warps, triton.cdiv(n, warps * _PIECE_PER_WARP)) for warps in _PIECE_WARPS)
    return [c for c in found if 2 <= c.pieces <= MOST_PIECES]


def cut(n: int, itemsize: int) -> Cut | None:
    """How a row of n waits in registers; None where one block does, as of a power of two.

    Pieces of 2048 with eight warps were the fastest or within 3 % of it at 5120, 7168 and 18432 on an H200, of 16, 512
    and 8192 rows, for rms_norm, add_rms_norm and softmax; longer rows of wide values take twice as many threads.
    """
    if n <= _WHOLE or n & (n - 1) == 0:
        return None
    lanes = 8 * itemsize // 4  # registers of a piece
    return next((c for c in cuts(n) if c.num_warps >= 8 and c.pieces * lanes <= _PIECE_REGISTERS), None)


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
