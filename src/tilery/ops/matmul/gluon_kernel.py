"""Warp-specialised: one warp keeps TMA copies in flight around a ring of tiles, warpgroups multiply what arrives."""

from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilery.base.spec import Artifact, TensorSpec, Work, dtype_name
from tilery.hardware import device
from tilery.languages import gluon_glue
from tilery.ops.matmul import layout, outputs
from tilery.parts.tiles import tiled_product

archs = ("sm_90",)  # wgmma

_ELEMENT = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


@dataclass(frozen=True)
class Config:
    block_m: int  # 64 a warpgroup
    block_n: int
    block_k: int
    stages: int  # tiles in the ring
    group_m: int = 8  # tiles of a column band that run together and share b in L2


def refusal(a: TensorSpec, b: TensorSpec, precision: str, config: Config | None = None) -> str | None:
    if a.dtype not in _ELEMENT:
        return f"wgmma takes fp16 and bf16, and would round {dtype_name(a.dtype)} to tf32"
    if not a.shape[1] or not b.shape[1]:
        return None  # nothing to describe to TMA
    for name, x in (("a", a), ("b", b)):
        step = x.stride(0) if layout(x) == "n" else x.stride(1)
        if not x.aligned or step % 8:
            return f"TMA needs {name} to start and step by multiples of 16 bytes, got {x}"
    if b.shape[1] % 8:
        return f"TMA stores rows of a multiple of 8, got N = {b.shape[1]}"
    if config and _shared(config) > device.shared_limit(archs[0]):
        return f"{config} needs {_shared(config)} bytes of shared memory, a block has {device.shared_limit(archs[0])}"
    return None


def _shared(config: Config) -> int:
    ring = config.stages * (config.block_m + config.block_n) * config.block_k
    return 2 * (ring + config.block_m * config.block_n) + 1024


def default(a: TensorSpec, b: TensorSpec, precision: str) -> Config:
    if a.shape[0] > 128:
        return Config(128, 256, 64, 3)
    return Config(64, 64, 128, 4)  # few rows: 18.6 µs at 16 × 4096 × 4096 on an H200, 128 wide 19.3, 32 wide 22.4


def configs(a: TensorSpec, b: TensorSpec, precision: str) -> list[Config]:
    tiles = [
        (128, 256, 64),
        (128, 128, 64),
        (128, 128, 128),
        (64, 256, 64),
        (64, 128, 128),
        (64, 64, 128),
        (64, 32, 128),
    ]
    found = [Config(*tile, stages) for tile in tiles for stages in (2, 3, 4, 6)]
    return [c for c in found if refusal(a, b, precision, c) is None]


def estimate(a: TensorSpec, b: TensorSpec, precision: str, config: Config) -> Work:
    return tiled_product(a, b, config.block_m, config.block_n)


@gluon.jit
def _load(a_desc, b_desc, a_ring, b_ring, full, empty, m, n, tiles, COLUMN_A: gl.constexpr, COLUMN_B: gl.constexpr):
    STAGES: gl.constexpr = a_ring.shape[0]
    BLOCK_K: gl.constexpr = a_ring.shape[1] if COLUMN_A else a_ring.shape[2]
    for i in range(tiles):
        slot = i % STAGES
        k = i * BLOCK_K
        mbarrier.wait(empty.index(slot), ((i // STAGES) & 1) ^ 1)  # the first time round every slot is empty
        arrived = full.index(slot)
        mbarrier.expect(arrived, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(a_desc, [k, m] if COLUMN_A else [m, k], arrived, a_ring.index(slot))
        tma.async_copy_global_to_shared(b_desc, [n, k] if COLUMN_B else [k, n], arrived, b_ring.index(slot))


@gluon.jit
def _multiply(c_desc, c_tile, a_ring, b_ring, full, empty, m, n, tiles, COLUMN_A: gl.constexpr, COLUMN_B: gl.constexpr):
    STAGES: gl.constexpr = a_ring.shape[0]
    BLOCK_M: gl.constexpr = c_tile.shape[0]
    BLOCK_N: gl.constexpr = c_tile.shape[1]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_N, 16])
    acc = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, MMA)
    for i in range(tiles):
        slot = i % STAGES
        mbarrier.wait(full.index(slot), (i // STAGES) & 1)
        a = a_ring.index(slot).permute((1, 0)) if COLUMN_A else a_ring.index(slot)
        b = b_ring.index(slot).permute((1, 0)) if COLUMN_B else b_ring.index(slot)
        acc = warpgroup_mma(a, b, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))  # the product before this one is done, so its slot may be filled
        mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), pred=i > 0)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    c_tile.store(acc.to(c_tile.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(c_desc, [m, n], c_tile)
    tma.store_wait(0)


@gluon.jit
def _matmul(
    a_desc, b_desc, c_desc, M, N, K,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    COLUMN_A: gl.constexpr, COLUMN_B: gl.constexpr,
):  # fmt: skip
    band = GROUP * gl.cdiv(N, BLOCK_N)
    first = gl.program_id(0) // band * GROUP
    height = min(gl.cdiv(M, BLOCK_M) - first, GROUP)
    m = (first + gl.program_id(0) % band % height) * BLOCK_M
    n = gl.program_id(0) % band // height * BLOCK_N
    tiles = gl.cdiv(K, BLOCK_K)

    a_ring = gl.allocate_shared_memory(a_desc.dtype, [STAGES] + a_desc.block_type.shape, a_desc.layout)
    b_ring = gl.allocate_shared_memory(b_desc.dtype, [STAGES] + b_desc.block_type.shape, b_desc.layout)
    c_tile = gl.allocate_shared_memory(c_desc.dtype, c_desc.block_type.shape, c_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (c_desc, c_tile, a_ring, b_ring, full, empty, m, n, tiles, COLUMN_A, COLUMN_B)),
            (_load, (a_desc, b_desc, a_ring, b_ring, full, empty, m, n, tiles, COLUMN_A, COLUMN_B)),
        ],
        [1],
        [24],
    )


def _arguments(outs, a, b, config: Config):
    """The launch arguments, of tensors for `run` and of specs for `compile`."""
    column_a, column_b = layout(a) == "t", layout(b) == "t"
    bm, bn, bk, element = config.block_m, config.block_n, config.block_k, _ELEMENT[a.dtype]

    def described(x, columns_first, rows, columns):
        block = [columns, rows] if columns_first else [rows, columns]
        shared = gl.NVMMASharedLayout.get_default_for(block, element)
        return gluon_glue.descriptor(x, columns_first, block, shared)

    descriptors = (described(a, column_a, bm, bk), described(b, column_b, bk, bn), described(outs[0], False, bm, bn))
    constants = {
        "BLOCK_M": bm, "BLOCK_N": bn, "BLOCK_K": bk, "STAGES": config.stages, "GROUP": config.group_m,
        "COLUMN_A": column_a, "COLUMN_B": column_b,
    }  # fmt: skip
    return (*descriptors, a.shape[0], b.shape[1], a.shape[1]), constants


def _warps(config: Config) -> int:
    return config.block_m // 16


def compile(specs, config: Config, arch: str) -> Artifact:
    a, b, _ = specs
    arguments, constants = _arguments(outputs(*specs), a, b, config)
    return gluon_glue.legacy_compile(_matmul, arguments, constants, {"num_warps": _warps(config)}, arch)


def run(outs, args, config: Config) -> None:
    a, b, _ = args
    if not a.shape[1]:  # TMA describes no empty tensor
        outs[0].zero_()
        return
    arguments, constants = _arguments(outs, a, b, config)
    grid = -(-a.shape[0] // config.block_m) * -(-b.shape[1] // config.block_n)
    _matmul[(grid,)](*arguments, **constants, num_warps=_warps(config))
