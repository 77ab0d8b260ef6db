"""TMA, wgmma and warpgroups for sm_90: tiles of many rows, or few rows whose blocks share K in a cluster."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tilery.backends import cuda_glue, tensor_maps
from tilery.parts import hopper_tiles
from tilery.parts.tiles import tiled_product
from tilery.spec import Artifact, TensorSpec, Work, dtype_name

archs = ("sm_90",)

_SOURCE = Path(__file__).with_name("hopper.cu")
_MANY = 1024  # rows, from which on tiles share b
_WIDTHS = (*hopper_tiles.NARROW, 128, 160, 192, 224, 256)
_FORMS = {
    "wide": {"block_m": (128,), "block_n": _WIDTHS, "splits": (1, 2), "share": (1, 2)},
    "few": {
        "block_m": hopper_tiles.FEW_ROWS,
        "block_n": hopper_tiles.FEW_COLUMNS,
        "splits": hopper_tiles.SPLITS,
        "share": (1,),
    },
}


@dataclass(frozen=True)
class Config(hopper_tiles.Config):
    share: int = 1  # blocks of a cluster that fetch b for each other; of the wide form

    @property
    def depth(self) -> int:  # type: ignore[override]
        return 2 if self.form == "few" else 1


def refusal(a: TensorSpec, b: TensorSpec, precision: str, config: Config | None = None) -> str | None:
    if a.dtype not in (torch.float16, torch.bfloat16):
        return f"wgmma takes fp16 and bf16, and would round {dtype_name(a.dtype)} to tf32"
    for name, x, along in (("a", a, 1), ("b", b, 0)):
        if x.stride(along) != 1 and x.shape[along] > 1 and 0 not in x.shape:
            return f"{name} must have K contiguous, got strides {list(x.strides)}"
    weight = b._replace(shape=b.shape[::-1], strides=b.strides[::-1])
    if why := tensor_maps.refusal("a", a) or tensor_maps.refusal("b", weight):
        return why
    if config is None:
        return None
    if why := hopper_tiles.refusal(config, _FORMS, b.shape[1], a.dtype.itemsize, a.device):
        return why
    if config.form == "wide" and config.splits > 1 and a.shape[1] < 128 * config.splits:
        return f"K must be at least {128 * config.splits} for {config.splits} blocks to share it, got {a.shape[1]}"
    return None


def default(a: TensorSpec, b: TensorSpec, precision: str) -> Config:
    (m, k), n = a.shape, b.shape[1]
    wide = {"staged": n % 8 == 0} | ({"share": 2, "group": 4} if m > _MANY else {})
    return hopper_tiles.default(Config, m, n, k // 128, _WIDTHS, 0, wide)


def configs(a: TensorSpec, b: TensorSpec, precision: str) -> list[Config]:
    (m, k), n = a.shape, b.shape[1]
    wide: list[dict[str, Any]] = [
        {"staged": staged, "share": s} for s in ((1, 2) if m > 128 else (1,)) for staged in (True, False)
    ]
    if m <= _MANY:
        wide.append({"splits": 2})
    found = [default(a, b, precision), *hopper_tiles.candidates(Config, m, n, k // 128, _WIDTHS, wide)]
    return [c for c in dict.fromkeys(found) if refusal(a, b, precision, c) is None]


def estimate(a: TensorSpec, b: TensorSpec, precision: str, config: Config) -> Work:
    return tiled_product(a, b, config.block_m, config.block_n, config.splits)


@functools.cache
def _kernel(dtype: torch.dtype, config: Config) -> cuda_glue.Kernel:
    c, of = config, cuda_glue.TYPES[dtype]
    if c.form == "wide":
        sizes = f"{c.block_n}, {c.stages}, {c.group}, {c.share}, {c.splits}, {str(c.staged).lower()}"
        name, parameters = f"hopper_matmul<{of}, {sizes}>", "TTTPiii"
    else:
        sizes = f"{c.block_m}, {c.warpgroups}, {c.width}, {c.stages}, {c.splits}"
        name, parameters = f"hopper_matmul_few<{of}, {sizes}>", "TTPiii"
    return cuda_glue.Kernel(_SOURCE, name, parameters, c.threads, c.shared, c.cluster, early=True)


def compile(specs, config: Config, arch: str) -> Artifact:
    return _kernel(specs[0].dtype, config).compile(arch)


def run(outs, args, config: Config) -> None:
    (a, b, _), c = args, outs[0]
    (m, k), n = a.shape, b.shape[1]
    if k == 0:
        c.zero_()  # there is no map of nothing
        return
    kernel = _kernel(a.dtype, config)
    maps = (tensor_maps.of(a, config.block_m), tensor_maps.of(b.t(), config.block_n // config.share))
    if config.form == "wide":
        maps += (tensor_maps.of(c, hopper_tiles.STORED_ROWS) if config.staged else maps[0],)
    kernel.launch(config.launched(m, n, kernel.resident()), *maps, c.data_ptr(), m, n, k)
