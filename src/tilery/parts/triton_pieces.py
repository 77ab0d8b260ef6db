"""TEMPORARY: old place of what is in ops/rows/triton_rows.py."""

from tilery.hardware.gpu import ARCHS as archs  # noqa: F401, N811
from tilery.ops.rows.triton_rows import Config as Config
from tilery.ops.rows.triton_rows import configs as configs
from tilery.ops.rows.triton_rows import default as default
from tilery.ops.rows.triton_rows import grid_of
from tilery.ops.rows.triton_rows import own_block as own_place  # noqa: F401
from tilery.ops.rows.triton_rows import own_columns as piece  # noqa: F401
from tilery.ops.rows.triton_rows import within as within


def cut(m, n, config):
    grid, constants = grid_of(m, n, config)
    return grid, {"BLOCK": constants["BLOCK"], "PLACE": constants["GRID"]}
