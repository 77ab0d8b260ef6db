"""A block turns a few heads of one token, of q or of k: each half of them is a tile."""

from dataclasses import dataclass

import cuda.tile as ct

from tilery.base.spec import Artifact, TensorSpec
from tilery.hardware.device import ARCHS
from tilery.languages import cutile_glue
from tilery.languages.cutile_glue import LegacyLaunch as Launch
from tilery.ops.rope import outputs
from tilery.parts.heads import heads

archs = ARCHS

_VALUES_PER_WARP = 4096  # 128 a lane


@dataclass(frozen=True)
class Config:
    heads: int  # of one block
    num_worker_warps: int = 4
    occupancy: int | None = None  # blocks on a processor that the compiler saves registers for


def refusal(
    q: TensorSpec, k: TensorSpec, cos: TensorSpec, sin, positions, layout: str, interleaved: bool,
    config: Config | None = None,
) -> str | None:  # fmt: skip
    half, size = cos.shape[1], q.shape[-1]
    if half & (half - 1) or size % half:
        return f"R / 2 must be a power of two that divides the head's {size}, as tiles are cut, got {half}"
    config = config or default(q, k, cos, sin, positions, layout, interleaved)
    values, most = config.heads * 2 * half, config.num_worker_warps * _VALUES_PER_WARP
    if values > most:
        return f"tile of {values} values does not fit the registers of {config.num_worker_warps} warps ({most} values)"
    why = cutile_glue.hint_refusal(config.num_worker_warps, config.occupancy, heads=config.heads)
    return why or cutile_glue.grid_refusal(_grid(config, q, k, layout))


def default(q: TensorSpec, k: TensorSpec, cos: TensorSpec, sin, positions, layout: str, interleaved: bool) -> Config:
    return _cut(q, k, cos, layout, 2048)


def configs(q: TensorSpec, k: TensorSpec, cos: TensorSpec, *how) -> list[Config]:
    cuts = [_cut(q, k, cos, how[2], values) for values in (1024, 2048, 4096, 8192)]
    found = [*cuts, *(Config(c.heads, 4, 8) for c in cuts), *(Config(c.heads, 8) for c in cuts)]
    return [c for c in dict.fromkeys(found) if refusal(q, k, cos, *how, config=c) is None]


def _cut(q: TensorSpec, k: TensorSpec, cos: TensorSpec, layout: str, values: int) -> Config:
    most = max(heads(q, layout).heads, heads(k, layout).heads, 1)
    return Config(min(max(values // (2 * cos.shape[1]), 1), 1 << (most - 1).bit_length()))


def _grid(config: Config, q, k, layout: str) -> int:
    shape = heads(q, layout)
    blocks = ct.cdiv(shape.heads, config.heads) + ct.cdiv(heads(k, layout).heads, config.heads)
    return shape.batch * shape.tokens * blocks


def _load(x, index, shape, tile):
    # Without TMA: with it a block gets four more warps and 255 registers a thread, compiled for sm_90.
    made = ct.load(x, index, shape, padding_mode=ct.PaddingMode.ZERO, allow_tma=False)
    return made.astype(ct.float32).reshape(tile)


def _store(y, index, shape, tile):
    ct.store(y, index, tile.reshape(shape).astype(y.dtype), allow_tma=False)  # what lies outside of y is dropped


def _turn(x, y, batch, place, block, cos, sin, HEADS, HALF, PARTS, INTERLEAVED):
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
    for part in range(2, PARTS):  # what is not turned
        shape, tile = (1, 1, HEADS, HALF), (HEADS, HALF)
        _store(y, (batch, place, block, part), shape, _load(x, (batch, place, block, part), shape, tile))


# Int64: tokens may be 2**31 elements apart.
@ct.kernel
def _rope(
    q: ct.IndexedWithInt64, k: ct.IndexedWithInt64, cos: ct.IndexedWithInt64, sin: ct.IndexedWithInt64, positions,
    q_out: ct.IndexedWithInt64, k_out: ct.IndexedWithInt64,
    Q_BLOCKS: ct.Constant[int], BLOCKS: ct.Constant[int], HEADS: ct.Constant[int], HALF: ct.Constant[int],
    PARTS: ct.Constant[int], INTERLEAVED: ct.Constant[int], PLACED: ct.Constant[int],
):  # fmt: skip
    token, block = divmod(ct.bid(0), BLOCKS)
    batch, place = divmod(token, q.shape[1])
    position = ct.load(positions, (token,), (1,)).item() if PLACED else place
    known = (position >= 0) & (position < cos.shape[0])
    row = ct.maximum(ct.minimum(position, cos.shape[0] - 1), 0)
    nan = ct.full((1, HALF), float("nan"), ct.float32)
    c = ct.where(known, _load(cos, (row, 0), (1, HALF), (1, HALF)), nan)
    s = ct.where(known, _load(sin, (row, 0), (1, HALF), (1, HALF)), nan)
    if block < Q_BLOCKS:
        _turn(q, q_out, batch, place, block, c, s, HEADS, HALF, PARTS, INTERLEAVED)
    else:
        _turn(k, k_out, batch, place, block - Q_BLOCKS, c, s, HEADS, HALF, PARTS, INTERLEAVED)


def _view(x, layout: str):
    """As [B, S, H, D]: of a tensor for a launch, of a spec for a compile."""
    if layout == "bshd":
        return x
    if isinstance(x, TensorSpec):
        batch, tokens, count, size, strides = heads(x, layout)
        return x._replace(shape=(batch, tokens, count, size), strides=(*strides, 1))
    return x.unsqueeze(0) if layout == "thd" else x.transpose(1, 2)


def _flat(positions):
    if isinstance(positions, TensorSpec):
        return positions._replace(shape=(positions.nbytes // positions.dtype.itemsize,), strides=(1,))
    return positions.view(-1)


def _launch(config: Config, outs, q, k, cos, sin, positions, layout, interleaved) -> Launch:
    """Of tensors for `run` and of specs for `compile`."""
    half, q_blocks = cos.shape[1], ct.cdiv(heads(q, layout).heads, config.heads)
    blocks = q_blocks + ct.cdiv(heads(k, layout).heads, config.heads)
    views = [_view(x, layout) for x in (q, k, *outs)]
    places = cos if positions is None else _flat(positions)  # what is not there is not read: any tensor will do
    constants = q_blocks, blocks, config.heads, half, q.shape[-1] // half, int(interleaved), int(positions is not None)
    kernel = cutile_glue.hinted(_rope, num_worker_warps=config.num_worker_warps, occupancy=config.occupancy)
    return Launch(kernel, _grid(config, q, k, layout), (*views[:2], cos, sin, places, *views[2:], *constants))


def compile(specs, config: Config, arch: str) -> Artifact:
    return cutile_glue.legacy_compile(_launch(config, outputs(*specs), *specs), arch)


def run(outs, args, config: Config) -> None:
    cutile_glue.legacy_run(_launch(config, outs, *args))
