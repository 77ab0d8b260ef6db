"""The four variants of SGLang's TileLang kernels, by the names of its files; tilelang_product.py is the code."""

from dataclasses import dataclass

import torch

from tilery.base.spec import DTYPES, Artifact, TensorSpec, Work, dtype_name
from tilery.hardware import device
from tilery.languages import tilelang_glue
from tilery.ops.fp8_matmul.tilelang_product import Problem, product
from tilery.parts.fp8 import GROUP, ceil_div
from tilery.parts.fp8_products import split_work, split_workspace

archs = ("sm_89", "sm_90", "sm_100", "sm_120")  # for sm_80 TileLang builds code without a product

_NAMES = {**tilelang_glue.NAMES, torch.float8_e4m3fn: "float8_e4m3fn", torch.float8_e5m2: "float8_e5m2"}
_TYPES = ("base", "swapAB", "splitK", "splitK_swapAB")
_FEW_ROWS, _SOME_ROWS = 64, 256  # up to here a is the narrow side, and K is cut
_PROCESSORS = 132  # of an H200: fewer tiles than that are cut along K


@dataclass(frozen=True)
class Config:
    kernel_type: str  # base, swapAB, splitK or splitK_swapAB
    block_m: int  # rows of what comes first in the product: of a, with swapAB of b
    block_n: int  # rows of what comes second: of b, with swapAB of a
    block_k: int
    num_stages: int
    threads: int  # that multiply; with TMA others fetch
    split_k: int = 1  # blocks that share a tile of c, each with a part of K
    c_scale_local: bool = False  # products of scales stand in registers, else in shared memory
    a_scale_shm: bool = False  # scales of a are fetched to shared memory with its tiles
    b_scale_shm: bool = False  # the same with swapAB, where a comes second

    @property
    def swapped(self) -> bool:
        return "swapAB" in self.kernel_type

    @property
    def tile(self) -> tuple[int, int]:
        """Rows of a and rows of b."""
        return (self.block_n, self.block_m) if self.swapped else (self.block_m, self.block_n)


def refusal(
    a: TensorSpec, a_scale: TensorSpec, b: TensorSpec, b_scale: TensorSpec, out_dtype: str, config: Config | None = None
) -> str | None:
    if a.dtype != b.dtype:
        return f"T.gemm takes two matrices of one format, got a in {dtype_name(a.dtype)} and b in {dtype_name(b.dtype)}"
    if config is None:
        return None
    if why := _type_refusal(config, a.shape[1] // GROUP) or _size_refusal(config):
        return why
    limit, need = device.shared_limit(device.arch(a.device)), _shared(config, DTYPES[out_dtype].itemsize)
    return f"{config} needs {need} bytes of shared memory, a block has {limit}" if need > limit else None


def _type_refusal(config: Config, blocks: int) -> str | None:
    """What does not go with the variant."""
    if config.kernel_type not in _TYPES:
        return f"kernel_type must be one of {', '.join(_TYPES)}, got {config.kernel_type!r}"
    if config.kernel_type not in ("splitK", "splitK_swapAB") and config.split_k != 1:
        return f"split_k must be 1 for {config.kernel_type}, got {config.split_k}; splitK and splitK_swapAB cut K"
    if config.kernel_type in ("splitK", "splitK_swapAB") and (config.split_k < 2 or blocks % config.split_k):
        return f"split_k must be 2 or more and divide K / {GROUP} = {blocks}, got {config.split_k}"
    wrong = "a_scale_shm" if config.swapped else "b_scale_shm"
    if getattr(config, wrong):
        right = "b_scale_shm" if config.swapped else "a_scale_shm"
        return f"{config.kernel_type} takes {right}: a comes {'second' if config.swapped else 'first'}; got {wrong}"
    return None


def _size_refusal(config: Config) -> str | None:
    if config.block_k != GROUP:
        return f"block_k must be {GROUP}, as far as a scale goes, got {config.block_k}"
    if any(size not in (16, 32, 64, 128, 256) for size in (config.block_m, config.block_n)):
        return f"block_m and block_n must be powers of two from 16 to 256, got {config.block_m} and {config.block_n}"
    if config.tile[1] > GROUP:
        which = "block_m" if config.swapped else "block_n"
        return f"{which} must be at most {GROUP}, as far as a scale of b goes, got {config.tile[1]}"
    if config.threads not in (128, 256):
        return f"threads must be 128 or 256, one or two warpgroups, got {config.threads}"
    if (config.block_m // 16) * (config.block_n // 8) < config.threads // 32:
        return f"every warp must have 16 × 8 of block_m × block_n, got {config}"
    if not 0 <= config.num_stages <= 16:
        return f"num_stages must be 0 to 16, got {config.num_stages}"
    return None


def _shared(config: Config, itemsize: int) -> int:
    """c's tile takes the place of a's and b's, which start on 1024 bytes, after the barriers; scales come behind."""
    stages, (rows, columns) = max(config.num_stages, 1), config.tile
    tiles = max(stages * (rows + columns) * GROUP, rows * columns * (itemsize if config.split_k == 1 else 4))
    fetched = stages * (config.a_scale_shm or config.b_scale_shm)
    return tiles + 4 * rows * (fetched + (not config.c_scale_local)) + 1024


def default(a: TensorSpec, a_scale: TensorSpec, b: TensorSpec, b_scale: TensorSpec, out_dtype: str) -> Config:
    (m, k), n = a.shape, b.shape[0]
    most = (device.shared_limit(device.arch(a.device)) - 8192) // GROUP  # rows of a and b under way
    if m > _FEW_ROWS:
        return _of("base", 128, 128, min(4, most // 256), 256)
    rows = next(size for size in (16, 32, 64) if m <= size)
    tiles, split, blocks = ceil_div(n, 64), 1, k // GROUP
    while 0 < tiles * split * 2 <= _PROCESSORS and blocks % (split * 2) == 0 and blocks >= 8 * split * 2:
        split *= 2
    return _of("swapAB", 64, rows, min(6, most // (64 + rows)), 128, split, b_scale_shm=True)


def configs(a: TensorSpec, a_scale: TensorSpec, b: TensorSpec, b_scale: TensorSpec, out_dtype: str) -> list[Config]:
    m = a.shape[0]
    found = _few(m) if m <= _FEW_ROWS else _some() if m <= _SOME_ROWS else _many()
    return [c for c in found if refusal(a, a_scale, b, b_scale, out_dtype, c) is None]


def _few(m: int) -> list[Config]:
    """b is streamed past the rows of a: how much of it is under way, and by how many blocks, is what differs."""
    rows = next(size for size in (16, 32, 64) if m <= size)
    swapped = [
        _of("swapAB", block_m, rows, stages, 128, split, b_scale_shm=shm)
        for split in (1, 2, 4, 8) for block_m in (64, 128)
        for stages, shm in ((2, True), (4, True), (8, True), (4, False))
    ]  # fmt: skip
    base = [_of("base", 64, block_n, 4, 128, split) for split in (1, 2, 4) for block_n in (64, 128)]
    return swapped if m <= 32 else swapped + base


def _some() -> list[Config]:
    tiles = ("base", 64, 64, 128), ("base", 64, 128, 128), ("base", 128, 128, 256), ("swapAB", 128, 64, 256)
    splits, depths = (1, 2, 4), (2, 4, 6)
    return [_of(*tile[:3], stages, tile[3], split) for split in splits for tile in tiles for stages in depths]


def _many() -> list[Config]:
    tiles = ("base", 64, 128, 128), ("base", 128, 64, 128), ("base", 128, 64, 256), ("base", 128, 128, 256)
    wide = ("swapAB", 128, 128, 256), ("swapAB", 64, 256, 256)
    return [_of(*tile[:3], stages, tile[3]) for tile in (*tiles, *wide) for stages in (2, 3, 4, 6)]


def _of(kind: str, block_m: int, block_n: int, stages: int, threads: int, split: int = 1, **more: bool) -> Config:
    """One that keeps the products of scales in registers; in shared memory they cost every step two barriers."""
    if split > 1:
        kind = {"base": "splitK", "swapAB": "splitK_swapAB"}[kind]
    return Config(kind, block_m, block_n, GROUP, stages, threads, split, c_scale_local=True, **more)


def estimate(
    a: TensorSpec, a_scale: TensorSpec, b: TensorSpec, b_scale: TensorSpec, out_dtype: str, config: Config
) -> Work:
    return split_work(a, b, *config.tile, config.split_k)


def workspace(
    a: TensorSpec, a_scale: TensorSpec, b: TensorSpec, b_scale: TensorSpec, out_dtype: str, config: Config
) -> tuple[TensorSpec, ...]:
    return split_workspace(a, b, config.split_k)


def _even(x, aligned: bool) -> bool:
    """May TMA describe x? Start and distance of rows must be multiples of 16 bytes; K is one of 128."""
    return aligned and x.stride(0) % 16 == 0 and x.stride(0) >= x.shape[1]


def _problem(a, a_scale, b, b_scale, out_dtype: str, even: bool) -> Problem:
    ones = [tuple(scale.stride(d) == 1 for d in range(2)) for scale in (a_scale, b_scale)]
    return Problem(b.shape[0], a.shape[1], _NAMES[a.dtype], _NAMES[DTYPES[out_dtype]], even, *ones)


def compile(specs, config: Config, arch: str) -> Artifact:
    a, _, b, _, _ = specs
    even = _even(a, a.aligned) and _even(b, b.aligned)
    return tilelang_glue.legacy_compile(product, (_problem(*specs, even), config), arch)


def run(outs, args, config: Config, *parts) -> None:
    a, a_scale, b, b_scale, _ = args
    if not a.shape[1]:  # a sum of nothing
        outs[0].zero_()
        return
    even = _even(a, a.data_ptr() % 16 == 0) and _even(b, b.data_ptr() % 16 == 0)
    tilelang_glue.legacy_launch(product, (_problem(*args, even), config), (a, a_scale, b, b_scale, outs[0], *parts))
