"""TMA, wgmma and warpgroups for sm_90: "wide" tiles of many rows, "few" rows whose blocks share K in a cluster.

The wide form is persistent: one thread fetches, two warpgroups multiply and promote in turns. The few form has weights
where wgmma wants 64 rows and tokens on its narrow side; parts of K are added through distributed shared memory, always
in the same order.
"""

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tilery import device
from tilery.backends import cuda_glue, tensor_maps
from tilery.parts.fp8 import GROUP, ceil_div
from tilery.parts.tiles import tiled_product
from tilery.spec import DTYPES, Artifact, TensorSpec, Work, dtype_name

archs = ("sm_90",)

_SOURCE = Path(__file__).with_name("fp8_matmul.cu")
_PROCESSORS = 132  # of an H200
_BARRIERS, _PATTERN, _RESERVED = 16, 1024, 1024  # bytes for a slot, to align the ring, that the driver takes of a block
_TILES = {"wide": ((128,), (128, 176, 192, 256)), "few": ((8, 16, 32, 64, 128), (64, 128, 256))}  # block_m, block_n
_SPLITS = {"wide": (1,), "few": (1, 2, 4, 8)}  # a cluster of more than 8 is not promised
_STORED_ROWS = 64  # of a tile of c, by each warpgroup
_GROUPS = (4, 8, 16)
_FEW_ROWS = 512  # up to here configs have both forms
_LEAST_BLOCKS = 4  # of K in a part, by default


@dataclass(frozen=True)
class Config:
    form: str  # "wide" or "few"
    block_m: int
    block_n: int
    stages: int  # slots of the ring
    splits: int = 1  # blocks of a cluster, which share K
    group: int = 8  # tiles of M that run together and share b in the L2; of the wide form
    staged: bool = False  # c goes through shared memory; of the wide form

    @property
    def tiles(self) -> int:
        """Bytes of a tile of a and one of b."""
        return (self.block_m + self.block_n) * GROUP

    @property
    def slot(self) -> int:
        """With their scales and barriers."""
        return self.tiles + (self.block_m + 4) * 4 + _BARRIERS

    @property
    def behind(self) -> int:
        """Bytes for a tile of c that is being stored, or for parts of it from the other blocks."""
        return self.block_m * self.block_n * (2 if self.staged else 4 if self.splits > 1 else 0)

    @property
    def shared(self) -> int:
        return _PATTERN + self.behind + self.stages * self.slot

    @property
    def threads(self) -> int:
        """Two warpgroups and one that fetches; a warpgroup for 64 weights and two warps that fetch."""
        return 384 if self.form == "wide" else self.block_n // 64 * 128 + 64

    def blocks(self, m: int, n: int) -> int:
        return ceil_div(m, self.block_m) * ceil_div(n, self.block_n) * self.splits


def refusal(
    a: TensorSpec, a_scale: TensorSpec, b: TensorSpec, b_scale: TensorSpec, out_dtype: str, config: Config | None = None
) -> str | None:
    for name, x in (("a", a), ("b", b)):
        if why := tensor_maps.refusal(name, x):
            return why
    return _config_refusal(config, a, b, out_dtype) if config else None


def _config_refusal(config: Config, a: TensorSpec, b: TensorSpec, out_dtype: str) -> str | None:
    if config.form not in _TILES:
        return f"form must be one of {', '.join(_TILES)}, got {config.form!r}"
    allowed = (*_TILES[config.form], _SPLITS[config.form])
    for name, values in zip(("block_m", "block_n", "splits"), allowed):
        if (got := getattr(config, name)) not in values:
            return f"{name} of the {config.form} form must be one of {', '.join(map(str, values))}, got {got}"
    if config.form == "few" and config.block_m * config.block_n > 64 * 256:
        return f"sums of {config.block_m} × {config.block_n} do not fit the registers of a block"
    if config.splits > (most := max(a.shape[1] // GROUP, 1)):
        return f"splits must be at most {most}, the blocks of {GROUP} in K, got {config.splits}"
    if config.stages < 2 or config.group < 1:
        return f"stages must be at least 2 and group at least 1, got {config.stages} and {config.group}"
    if config.staged and (config.form != "wide" or config.block_n % 64):
        return f"tiles of c are staged 64 columns at a time, in the wide form alone, got {config}"
    if config.staged and (DTYPES[out_dtype].itemsize != 2 or b.shape[0] % 8):
        return f"rows of c must be of 2-byte values, 8 at a time, to be staged, got {b.shape[0]} of {out_dtype}"
    if config.form == "few" and config.block_m * (config.block_n + 4) * 4 > config.stages * config.tiles:
        return f"the tile of c must fit the ring of {config.stages} stages, got {config}"
    limit = device.shared_limit(device.arch(a.device)) - _RESERVED
    if config.shared > limit:
        return f"ring of {config.stages} stages takes {config.shared} bytes of shared memory, {limit} are there"
    return None


def default(a: TensorSpec, a_scale: TensorSpec, b: TensorSpec, b_scale: TensorSpec, out_dtype: str) -> Config:
    (m, k), n = a.shape, b.shape[0]
    if m > 64 and ceil_div(m, 128) * ceil_div(n, 128) >= _PROCESSORS // 2:
        block_n = 256 if ceil_div(m, 128) * ceil_div(n, 256) >= _PROCESSORS else 128
        staged = DTYPES[out_dtype].itemsize == 2 and n % 8 == 0
        return _with_ring("wide", 128, block_n, group=16, staged=staged)
    block_m = next((size for size in _TILES["few"][0] if size >= m), 128)
    down = ceil_div(m, block_m)
    block_n = 64 if down * ceil_div(n, 64) <= _PROCESSORS else 128
    tiles, parts = down * ceil_div(n, block_n), max(k // GROUP // _LEAST_BLOCKS, 1)
    splits = max(s for s in _SPLITS["few"] if s == 1 or (s <= parts and tiles * s <= _PROCESSORS))
    return _with_ring("few", block_m, block_n, splits, resident=2 if tiles > _PROCESSORS and block_m < 128 else 1)


def _with_ring(form: str, block_m: int, block_n: int, splits: int = 1, resident: int = 1, **more: Any) -> Config:
    """As many stages as so many blocks on a processor leave room for, up to 8."""
    one = Config(form, block_m, block_n, 1, splits, **more)
    room = device.shared_limit("sm_90") // resident - _RESERVED - _PATTERN - one.behind
    return replace(one, stages=min(room // one.slot, 8))


def configs(a: TensorSpec, a_scale: TensorSpec, b: TensorSpec, b_scale: TensorSpec, out_dtype: str) -> list[Config]:
    m = a.shape[0]
    found = [default(a, a_scale, b, b_scale, out_dtype)]
    if m > 64:
        found += [
            _with_ring("wide", 128, block_n, group=group, staged=staged)
            for block_n in _TILES["wide"][1]
            for group in (_GROUPS if m > 128 * _GROUPS[0] else _GROUPS[-1:])
            for staged in (True, False)
        ]
    if m <= _FEW_ROWS:
        sizes, widths = _TILES["few"]
        enough = next((i for i, size in enumerate(sizes) if size >= m), len(sizes) - 1)
        found += [
            _with_ring("few", block_m, block_n, splits, resident)
            for block_m in sizes[max(enough - 1, 0) : enough + 1]
            for block_n in widths
            for splits in _SPLITS["few"]
            for resident in ((2, 1) if block_n <= 128 else (1,))
        ]
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
        sizes = parts, c.block_n // parts, c.stages, c.group, str(c.staged).lower()
        name, parameters = f"fp8_matmul<{types}, {', '.join(map(str, sizes))}>", "TTTPqqPqqPiii"
    else:
        name = f"fp8_matmul_few<{types}, {c.block_m}, {c.block_n // 64}, {c.stages}, {c.splits}>"
        parameters = "TTPqqPqqPiii"
    return cuda_glue.Kernel(_SOURCE, name, parameters, c.threads, c.shared, cluster=c.splits)


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
    blocks = config.blocks(m, n)
    if config.form == "wide":  # persistent
        blocks = min(blocks, kernel.resident())
    maps = (tensor_maps.of(a, config.block_m), tensor_maps.of(b, config.block_n))
    if config.form == "wide":
        maps += (tensor_maps.of(c, _STORED_ROWS) if config.staged else maps[0],)
    a_scales, b_scales = ((s.data_ptr(), *s.stride()) for s in (a_scale, b_scale))
    kernel.launch(blocks, *maps, *a_scales, *b_scales, c.data_ptr(), m, n, k)
