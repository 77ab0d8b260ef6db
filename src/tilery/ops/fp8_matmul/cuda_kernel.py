"""TMA, wgmma and warpgroups for sm_90: tiles of many rows, or few rows whose blocks share K in a cluster.

Sums over 128 of K are promoted to fp32 by one warpgroup while another multiplies; scales come around the ring with the
tiles that they belong to, whatever their strides.
"""

import functools
from dataclasses import dataclass
from pathlib import Path

import torch

from tilery.base.spec import DTYPES, Artifact, TensorSpec, Work, dtype_name
from tilery.languages import cuda_glue, tensor_maps
from tilery.parts import hopper_tiles
from tilery.parts.fp8 import GROUP
from tilery.parts.tiles import tiled_product

archs = ("sm_90",)

_SOURCE = Path(__file__).with_name("fp8_matmul.cu")
_WIDTHS = (*hopper_tiles.NARROW, 128, 176, 192, 256)
_ENTRY = 48  # columns whose time a tile takes besides its own: its sums are promoted
_FORMS = {
    "wide": {"block_m": (128,), "block_n": _WIDTHS, "splits": (1,)},
    "few": {
        "block_m": hopper_tiles.FEW_ROWS,
        "block_n": hopper_tiles.FEW_COLUMNS,
        "splits": hopper_tiles.SPLITS,
    },
}


@dataclass(frozen=True)
class Config(hopper_tiles.Config):
    fetching_warps = 2  # one for tiles, one for scales

    @property
    def notes(self) -> int:  # type: ignore[override]
        return (self.block_m + 4) * 4


def refusal(
    a: TensorSpec, a_scale: TensorSpec, b: TensorSpec, b_scale: TensorSpec, out_dtype: str, config: Config | None = None
) -> str | None:
    if why := tensor_maps.refusal("a", a) or tensor_maps.refusal("b", b):
        return why
    if config is None:
        return None
    if why := hopper_tiles.refusal(config, _FORMS, b.shape[0], DTYPES[out_dtype].itemsize, a.device):
        return why
    if config.splits > (most := max(a.shape[1] // GROUP, 1)):
        return f"splits must be at most {most}, the blocks of {GROUP} in K, got {config.splits}"
    return None


def default(a: TensorSpec, a_scale: TensorSpec, b: TensorSpec, b_scale: TensorSpec, out_dtype: str) -> Config:
    (m, k), n = a.shape, b.shape[0]
    wide = {"group": 16, "staged": DTYPES[out_dtype].itemsize == 2 and n % 8 == 0}
    return hopper_tiles.default(Config, m, n, k // GROUP, _WIDTHS, _ENTRY, wide)


def configs(a: TensorSpec, a_scale: TensorSpec, b: TensorSpec, b_scale: TensorSpec, out_dtype: str) -> list[Config]:
    (m, k), n = a.shape, b.shape[0]
    wide = [{"staged": staged} for staged in (True, False)]
    found = hopper_tiles.candidates(Config, m, n, k // GROUP, _WIDTHS, wide)
    found = [default(a, a_scale, b, b_scale, out_dtype), *found]
    return [c for c in dict.fromkeys(found) if refusal(a, a_scale, b, b_scale, out_dtype, c) is None]


def estimate(
    a: TensorSpec, a_scale: TensorSpec, b: TensorSpec, b_scale: TensorSpec, out_dtype: str, config: Config
) -> Work:
    columns = b._replace(shape=b.shape[::-1], strides=b.strides[::-1])
    return tiled_product(a, columns, config.block_m, config.block_n, config.splits)


@functools.cache
def _kernel(a: torch.dtype, b: torch.dtype, out: torch.dtype, config: Config) -> cuda_glue.Kernel:
    c, types = config, f"{dtype_name(a)}, {dtype_name(b)}, {cuda_glue.TYPES[out]}"
    if c.form == "wide":
        parts = 1 if c.block_n <= 128 else 2
        sizes = f"{parts}, {c.block_n // parts}, {c.stages}, {c.group}, {str(c.staged).lower()}"
        name, maps = f"fp8_matmul<{types}, {sizes}>", 3
    else:
        sizes = f"{c.block_m}, {c.warpgroups}, {c.width}, {c.stages}, {c.splits}"
        name, maps = f"fp8_matmul_small_m<{types}, {sizes}>", 2
    return cuda_glue.Kernel(_SOURCE, name, (None,) * (maps + 1), c.threads, c.shared, c.cluster, early=True)


def compile(specs, config: Config, arch: str) -> Artifact:
    a, _, b, _, out_dtype = specs
    return _kernel(a.dtype, b.dtype, DTYPES[out_dtype], config).compile(arch)


def run(outs, args, config: Config) -> None:
    a, a_scale, b, b_scale, _ = args
    (m, k), n, c = a.shape, b.shape[0], outs[0]
    if k == 0:
        c.zero_()  # there are no scales to read and no map of nothing
        return
    kernel = _kernel(a.dtype, b.dtype, c.dtype, config)
    maps = (tensor_maps.of(a, config.block_m), tensor_maps.of(b, config.block_n))
    if config.form == "wide":
        maps += (tensor_maps.of(c, hopper_tiles.STORED_ROWS) if config.staged else maps[0],)
    a_scales, b_scales = ((s.data_ptr(), *s.stride()) for s in (a_scale, b_scale))
    blocks = config.launched(m, n, kernel.resident())
    params = cuda_glue.params(_SOURCE, "fp8_matmul", *a_scales, *b_scales, c.data_ptr(), m, n, k)
    kernel.launch(blocks, *maps, params)
