"""A block takes one tile of a few rows and columns: nothing is shared between elements, so any cut will do."""

import cuda.tile as ct

from tilery.backends import cutile_glue
from tilery.backends.cutile_glue import RowConfig as Config
from tilery.backends.cutile_glue import matrix
from tilery.op import Artifact, TensorSpec
from tilery.ops.rows import rows
from tilery.ops.silu_mul import outputs

archs = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")


def _blocks(gate, config: Config) -> int:
    m, n, _ = rows(gate)
    return ct.cdiv(m, config.rows) * ct.cdiv(n, config.tile)


def refusal(gate: TensorSpec, up: TensorSpec, config: Config | None = None) -> str | None:
    config = config or default(gate, up)
    return cutile_glue.row_refusal(config, _blocks(gate, config))


def default(gate: TensorSpec, up: TensorSpec) -> Config:
    return _cut(gate, 2048)


def configs(gate: TensorSpec, up: TensorSpec) -> list[Config]:
    cuts = [_cut(gate, values) for values in (1024, 2048, 4096, 8192)]
    found = [*cuts, *(Config(c.rows, c.tile, num_worker_warps=8) for c in cuts)]
    return [c for c in dict.fromkeys(found) if refusal(gate, up, c) is None]


def _cut(gate: TensorSpec, values: int) -> Config:
    tile = min(cutile_glue.row_tile(gate.shape[-1]), values)
    return Config(rows=values // tile, tile=tile)


def _load(x, index, shape):
    # Without TMA: with it a block gets four more warps and 255 registers a thread, compiled for sm_90.
    return ct.load(x, index, shape, padding_mode=ct.PaddingMode.ZERO, allow_tma=False).astype(ct.float32)


@ct.kernel
def _silu_mul(
    gate: ct.IndexedWithInt64, up: ct.IndexedWithInt64, y: ct.IndexedWithInt64,
    ROWS: ct.Constant[int], TILE: ct.Constant[int],
):  # fmt: skip
    index = divmod(ct.bid(0), ct.num_tiles(gate, 1, (ROWS, TILE)))  # neighbours take the same rows
    g = _load(gate, index, (ROWS, TILE))
    # The approximate division errs by 2 ulp; an exact one has a branch for every element.
    sigmoid = ct.truediv(1.0, 1.0 + ct.exp(-g), rounding_mode=ct.RoundingMode.APPROX)
    y_tile = g * sigmoid * _load(up, index, (ROWS, TILE))
    ct.store(y, index, y_tile.astype(y.dtype), allow_tma=False)  # what lies outside of y is dropped


def _prepared(outs, gate, up, config: Config):
    """The kernel and its launch arguments, of tensors for `run` and of specs for `compile`."""
    arguments = (matrix(gate), matrix(up), matrix(outs[0]), config.rows, config.tile)
    return cutile_glue.row_hinted(_silu_mul, config), arguments


def compile(specs, config: Config, arch: str) -> Artifact:
    return cutile_glue.compile(*_prepared(outputs(*specs), *specs, config), arch)


def run(outs, args, config: Config) -> None:
    kernel, arguments = _prepared(outs, *args, config)
    cutile_glue.launch(kernel, _blocks(args[0], config), arguments)
