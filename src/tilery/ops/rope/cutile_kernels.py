"""rope in cuTile: a block rotates a few heads of one token, of q or of k; each half of them is a tile."""

from dataclasses import dataclass

import cuda.tile as ct

from tilery.base.launch import Argument, Launch
from tilery.core.kernel import Kernel
from tilery.hardware.gpu import ARCHS
from tilery.languages import cutile_glue
from tilery.ops.rope.call import RopeCall, heads

_VALUES_PER_WARP = 4096  # 128 a lane


def _load(x, index, shape, tile):
    # Without TMA: with it a block gets four more warps and 255 registers a thread, compiled for sm_90.
    made = ct.load(x, index, shape, padding_mode=ct.PaddingMode.ZERO, allow_tma=False)
    return made.astype(ct.float32).reshape(tile)


def _store(y, index, shape, tile):
    ct.store(y, index, tile.reshape(shape).astype(y.dtype), allow_tma=False)  # what lies outside of y is dropped


def _rotate(x, y, batch, place, block, cos, sin, HEADS, HALF, PARTS, INTERLEAVED):
    if INTERLEAVED:
        shape, index = (1, 1, HEADS, 2 * HALF), (batch, place, block, 0)
        pairs = _load(x, index, shape, (HEADS, HALF, 2))
        a = ct.extract(pairs, (0, 0, 0), (HEADS, HALF, 1)).reshape((HEADS, HALF))
        b = ct.extract(pairs, (0, 0, 1), (HEADS, HALF, 1)).reshape((HEADS, HALF))
        first = (a * cos - b * sin).reshape((HEADS, HALF, 1))
        second = (b * cos + a * sin).reshape((HEADS, HALF, 1))
        _store(y, index, shape, ct.cat((first, second), 2))
    else:
        shape, tile = (1, 1, HEADS, HALF), (HEADS, HALF)
        a = _load(x, (batch, place, block, 0), shape, tile)
        b = _load(x, (batch, place, block, 1), shape, tile)
        _store(y, (batch, place, block, 0), shape, a * cos - b * sin)
        _store(y, (batch, place, block, 1), shape, b * cos + a * sin)
    for part in range(2, PARTS):  # what is not rotated
        shape, tile = (1, 1, HEADS, HALF), (HEADS, HALF)
        _store(y, (batch, place, block, part), shape, _load(x, (batch, place, block, part), shape, tile))


# Int64: tokens may be 2**31 elements apart.
@ct.kernel
def _rope(
    q: ct.IndexedWithInt64, k: ct.IndexedWithInt64, cos: ct.IndexedWithInt64, sin: ct.IndexedWithInt64, positions,
    q_out: ct.IndexedWithInt64, k_out: ct.IndexedWithInt64,
    Q_BLOCKS: ct.Constant[int], BLOCKS: ct.Constant[int], HEADS: ct.Constant[int], HALF: ct.Constant[int],
    PARTS: ct.Constant[int], INTERLEAVED: ct.Constant[int], HAS_POSITIONS: ct.Constant[int],
):  # fmt: skip
    token, block = divmod(ct.bid(0), BLOCKS)
    batch, place = divmod(token, q.shape[1])
    position = ct.load(positions, (token,), (1,)).item() if HAS_POSITIONS else place
    known = (position >= 0) & (position < cos.shape[0])
    row = ct.maximum(ct.minimum(position, cos.shape[0] - 1), 0)
    nan = ct.full((1, HALF), float("nan"), ct.float32)
    c = ct.where(known, _load(cos, (row, 0), (1, HALF), (1, HALF)), nan)
    s = ct.where(known, _load(sin, (row, 0), (1, HALF), (1, HALF)), nan)
    if block < Q_BLOCKS:
        _rotate(q, q_out, batch, place, block, c, s, HEADS, HALF, PARTS, INTERLEAVED)
    else:
        _rotate(k, k_out, batch, place, block - Q_BLOCKS, c, s, HEADS, HALF, PARTS, INTERLEAVED)


@dataclass(frozen=True)
class Config:
    heads: int  # of one block
    num_worker_warps: int = 4
    occupancy: int | None = None  # blocks on an SM that the compiler saves registers for


class Rope(Kernel):
    archs = ARCHS
    Config = Config

    def refusal(self, call: RopeCall, config: Config | None = None) -> str | None:
        half, size = call.half, call.q_heads.size
        if half & (half - 1) or size % half:
            return f"R / 2 must be a power of two that divides the head's {size}, as tiles are cut, got {half}"
        config = config or self.default(call)
        warps = config.num_worker_warps
        values, most = config.heads * 2 * half, warps * _VALUES_PER_WARP
        if values > most:
            return f"tile of {values} values does not fit the registers of {warps} warps ({most} values)"
        why = cutile_glue.hint_refusal(warps, config.occupancy, heads=config.heads)
        return why or cutile_glue.grid_refusal(call.tokens * sum(_blocks(call, config)))

    def default(self, call: RopeCall) -> Config:
        return self._cut(call, 2048)

    def configs(self, call: RopeCall) -> list[Config]:
        cuts = [self._cut(call, values) for values in (1024, 2048, 4096, 8192)]
        found = [*cuts, *(Config(c.heads, 4, 8) for c in cuts), *(Config(c.heads, 8) for c in cuts)]
        return [c for c in dict.fromkeys(found) if self.refusal(call, c) is None]

    def _cut(self, call: RopeCall, values: int) -> Config:
        most = max(call.q_heads.heads, call.k_heads.heads, 1)
        return Config(min(max(values // (2 * call.half), 1), 1 << (most - 1).bit_length()))

    def launches(self, call: RopeCall, config: Config) -> list[Launch]:
        q_blocks, k_blocks = _blocks(call, config)
        views = {name: _bshd(getattr(call, name), call.layout) for name in ("q", "k", "q_out", "k_out")}
        # Positions that are not there are not read: any tensor will do.
        positions = call.cos if call.positions is None else _flat(call.positions, call.tokens)
        args = {**views, "cos": call.cos, "sin": call.sin, "positions": positions}
        constants = {
            "Q_BLOCKS": q_blocks, "BLOCKS": q_blocks + k_blocks, "HEADS": config.heads, "HALF": call.half,
            "PARTS": call.q_heads.size // call.half, "INTERLEAVED": int(call.interleaved),
            "HAS_POSITIONS": int(call.positions is not None),
        }  # fmt: skip
        hints = {"num_worker_warps": config.num_worker_warps, "occupancy": config.occupancy}
        return [Launch(_rope, call.tokens * (q_blocks + k_blocks), args, constants, hints)]


def _blocks(call: RopeCall, config: Config) -> tuple[int, int]:
    """Blocks for the heads of q and of k of one token."""
    return ct.cdiv(call.q_heads.heads, config.heads), ct.cdiv(call.k_heads.heads, config.heads)


def _bshd(x: Argument, layout: str) -> Argument:
    """A view as [B, S, H, D]."""
    if layout == "bshd":
        return x
    batch, tokens, count, size, (sequence, token, head) = heads(x, layout)
    if layout == "thd":
        sequence = tokens * token  # of the only one; cuTile compiles for what divides it
    return x._replace(shape=(batch, tokens, count, size), strides=(sequence, token, head, 1))


def _flat(positions: Argument, tokens: int) -> Argument:
    return positions._replace(shape=(tokens,), strides=(1,))


rope = Rope()
