"""fp8_matmul in TileLang: the four variants of SGLang's kernels, by the names of its files.

tilelang_product.py has the code.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tilery.base.integers import ceil_div
from tilery.base.launch import Host, Launch
from tilery.base.spec import DTYPES, TensorSpec, Work, dtype_name
from tilery.core.kernel import Kernel
from tilery.hardware.gpu import gpu
from tilery.languages import tilelang_glue
from tilery.ops.fp8_matmul.call import Fp8MatmulCall
from tilery.ops.fp8_matmul.split_k import split_k_work, split_k_workspace
from tilery.ops.fp8_matmul.tilelang_product import Specialization, product
from tilery.ops.quantize.formats import GROUP

_NAMES = {**tilelang_glue.NAMES, torch.float8_e4m3fn: "float8_e4m3fn", torch.float8_e5m2: "float8_e5m2"}
_TYPES = ("base", "swapAB", "splitK", "splitK_swapAB")
_FEW_ROWS, _SOME_ROWS = 64, 256  # up to here a is the narrow side, and K is split


@dataclass(frozen=True)
class Config:
    kernel_type: str  # base, swapAB, splitK or splitK_swapAB
    block_m: int  # rows of what comes first in the product: of a, with swapAB of b
    block_n: int  # rows of what comes second: of b, with swapAB of a
    block_k: int
    num_stages: int
    threads: int  # that multiply; with TMA others load
    split_k: int = 1  # blocks that share a tile of c, each with a part of K
    c_scale_local: bool = False  # products of scales stand in registers, else in shared memory
    a_scale_shm: bool = False  # scales of a are loaded to shared memory with its tiles
    b_scale_shm: bool = False  # the same with swapAB, where a comes second

    @property
    def swapped(self) -> bool:
        return "swapAB" in self.kernel_type

    @property
    def tile(self) -> tuple[int, int]:
        """Rows of a and rows of b."""
        return (self.block_n, self.block_m) if self.swapped else (self.block_m, self.block_n)


class Fp8Matmul(Kernel):
    archs = ("sm_89", "sm_90", "sm_100", "sm_120")  # for sm_80 TileLang builds code without a product
    Config = Config

    def refusal(self, call: Fp8MatmulCall, config: Config | None = None) -> str | None:
        a, b = call.a, call.b
        if a.dtype != b.dtype:
            kinds = f"a in {dtype_name(a.dtype)} and b in {dtype_name(b.dtype)}"
            return f"T.gemm takes two matrices of one format, got {kinds}"
        if config is None:
            return None
        if why := _type_refusal(config, call.k // GROUP) or _size_refusal(config):
            return why
        limit, need = gpu(a.device).shared_per_block, _shared(config, DTYPES[call.out_dtype].itemsize)
        return f"{config} needs {need} bytes of shared memory, a block has {limit}" if need > limit else None

    def default(self, call: Fp8MatmulCall) -> Config:
        card, m = gpu(call.a.device), call.m
        most = (card.shared_per_block - 8192) // GROUP  # rows of a and b in flight
        if m > _FEW_ROWS:
            return _config("base", 128, 128, min(4, most // 256), 256)
        rows = next(size for size in (16, 32, 64) if m <= size)
        tiles, split, blocks = ceil_div(call.n, 64), 1, call.k // GROUP
        # Fewer tiles than SMs are split along K.
        while 0 < tiles * split * 2 <= card.sms and blocks % (split * 2) == 0 and blocks >= 8 * split * 2:
            split *= 2
        return _config("swapAB", 64, rows, min(6, most // (64 + rows)), 128, split, b_scale_shm=True)

    def configs(self, call: Fp8MatmulCall) -> list[Config]:
        if call.m <= _FEW_ROWS:
            found = _few_row_configs(call.m)
        else:
            found = _some_row_configs() if call.m <= _SOME_ROWS else _many_row_configs()
        return [c for c in found if self.refusal(call, c) is None]

    def estimate(self, call: Fp8MatmulCall, config: Config) -> Work:
        return split_k_work(call, *config.tile, config.split_k)

    def workspace(self, call: Fp8MatmulCall, config: Config) -> dict[str, TensorSpec]:
        return split_k_workspace(call, config.split_k)

    def launches(self, call: Fp8MatmulCall, config: Config) -> list[Launch | Host]:
        if not call.k:  # a sum of nothing
            return [Host(Tensor.zero_, (call.c,))]
        a_ones, b_ones = (tuple(s.stride(d) == 1 for d in range(2)) for s in (call.a_scale, call.b_scale))
        format, out, even = _NAMES[call.a.dtype], _NAMES[call.c.dtype], _even(call.a) and _even(call.b)
        constants = {"of": Specialization(call.n, call.k, format, out, even, a_ones, b_ones), "config": config}
        args = {"a": call.a, "a_scale": call.a_scale, "b": call.b, "b_scale": call.b_scale, "c": call.c}
        if config.split_k > 1:
            args["c_parts"] = call.parts
        return [Launch(product, 1, args, constants)]


def _even(x: TensorSpec) -> bool:
    """May TMA describe x? Start and distance of rows must be multiples of 16 bytes; K is one of 128."""
    return x.aligned and x.stride(0) % 16 == 0 and x.stride(0) >= x.shape[1]


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
    """Bytes. c's tile takes the place of a's and b's, which start on 1024 bytes, after the barriers, before scales."""
    stages, (rows, columns) = max(config.num_stages, 1), config.tile
    tiles = max(stages * (rows + columns) * GROUP, rows * columns * (itemsize if config.split_k == 1 else 4))
    in_shared = stages * (config.a_scale_shm or config.b_scale_shm)
    return tiles + 4 * rows * (in_shared + (not config.c_scale_local)) + 1024


def _few_row_configs(m: int) -> list[Config]:
    """b is streamed past the rows of a: how much of it is in flight, and by how many blocks, is what differs."""
    rows = next(size for size in (16, 32, 64) if m <= size)
    swapped = [
        _config("swapAB", block_m, rows, stages, 128, split, b_scale_shm=shm)
        for split in (1, 2, 4, 8) for block_m in (64, 128)
        for stages, shm in ((2, True), (4, True), (8, True), (4, False))
    ]  # fmt: skip
    base = [_config("base", 64, block_n, 4, 128, split) for split in (1, 2, 4) for block_n in (64, 128)]
    return swapped if m <= 32 else swapped + base


def _some_row_configs() -> list[Config]:
    tiles = ("base", 64, 64, 128), ("base", 64, 128, 128), ("base", 128, 128, 256), ("swapAB", 128, 64, 256)
    splits, depths = (1, 2, 4), (2, 4, 6)
    return [_config(*tile[:3], stages, tile[3], split) for split in splits for tile in tiles for stages in depths]


def _many_row_configs() -> list[Config]:
    tiles = ("base", 64, 128, 128), ("base", 128, 64, 128), ("base", 128, 64, 256), ("base", 128, 128, 256)
    wide = ("swapAB", 128, 128, 256), ("swapAB", 64, 256, 256)
    return [_config(*tile[:3], stages, tile[3]) for tile in (*tiles, *wide) for stages in (2, 3, 4, 6)]


def _config(kind: str, block_m: int, block_n: int, stages: int, threads: int, split: int = 1, **more: bool) -> Config:
    """One that keeps the products of scales in registers; in shared memory they cost every step two barriers."""
    if split > 1:
        kind = {"base": "splitK", "swapAB": "splitK_swapAB"}[kind]
    return Config(kind, block_m, block_n, GROUP, stages, threads, split, c_scale_local=True, **more)


fp8_matmul = Fp8Matmul()
