"""matmul in Gluon, warp-specialised: a producer warp keeps TMA loads in flight, consumer warpgroups multiply."""

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilery.base.launch import Argument, Host, Launch
from tilery.base.spec import Work, dtype_name
from tilery.core.kernel import Kernel
from tilery.hardware.gpu import gpu
from tilery.languages.gluon_glue import Descriptor
from tilery.ops.matmul.call import MatmulCall, gemm_work, layout

_ELEMENT = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


@gluon.jit
def _load(
    a_desc, b_desc, a_stages, b_stages, full, empty, m, n, k_blocks, COLUMN_A: gl.constexpr, COLUMN_B: gl.constexpr
):
    STAGES: gl.constexpr = a_stages.shape[0]
    BLOCK_K: gl.constexpr = a_stages.shape[1] if COLUMN_A else a_stages.shape[2]
    for i in range(k_blocks):
        stage = i % STAGES
        k = i * BLOCK_K
        mbarrier.wait(empty.index(stage), ((i // STAGES) & 1) ^ 1)  # the first time round every stage is empty
        loaded = full.index(stage)
        mbarrier.expect(loaded, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(a_desc, [k, m] if COLUMN_A else [m, k], loaded, a_stages.index(stage))
        tma.async_copy_global_to_shared(b_desc, [n, k] if COLUMN_B else [k, n], loaded, b_stages.index(stage))


@gluon.jit
def _multiply(
    c_desc, c_tile, a_stages, b_stages, full, empty, m, n, k_blocks, COLUMN_A: gl.constexpr, COLUMN_B: gl.constexpr
):
    STAGES: gl.constexpr = a_stages.shape[0]
    BLOCK_M: gl.constexpr = c_tile.shape[0]
    BLOCK_N: gl.constexpr = c_tile.shape[1]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_N, 16])
    acc = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, MMA)
    for i in range(k_blocks):
        stage = i % STAGES
        mbarrier.wait(full.index(stage), (i // STAGES) & 1)
        a = a_stages.index(stage).permute((1, 0)) if COLUMN_A else a_stages.index(stage)
        b = b_stages.index(stage).permute((1, 0)) if COLUMN_B else b_stages.index(stage)
        acc = warpgroup_mma(a, b, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))  # the product before this one is done, so its stage may be filled
        mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), pred=i > 0)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    c_tile.store(acc.to(c_tile.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(c_desc, [m, n], c_tile)
    tma.store_wait(0)


@gluon.jit
def _matmul(
    a_desc, b_desc, c_desc, M, N, K,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    COLUMN_A: gl.constexpr, COLUMN_B: gl.constexpr,
):  # fmt: skip
    tiles_in_group = GROUP_M * gl.cdiv(N, BLOCK_N)
    first = gl.program_id(0) // tiles_in_group * GROUP_M
    height = min(gl.cdiv(M, BLOCK_M) - first, GROUP_M)
    m = (first + gl.program_id(0) % tiles_in_group % height) * BLOCK_M
    n = gl.program_id(0) % tiles_in_group // height * BLOCK_N
    k_blocks = gl.cdiv(K, BLOCK_K)

    a_stages = gl.allocate_shared_memory(a_desc.dtype, [STAGES] + a_desc.block_type.shape, a_desc.layout)
    b_stages = gl.allocate_shared_memory(b_desc.dtype, [STAGES] + b_desc.block_type.shape, b_desc.layout)
    c_tile = gl.allocate_shared_memory(c_desc.dtype, c_desc.block_type.shape, c_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (c_desc, c_tile, a_stages, b_stages, full, empty, m, n, k_blocks, COLUMN_A, COLUMN_B)),
            (_load, (a_desc, b_desc, a_stages, b_stages, full, empty, m, n, k_blocks, COLUMN_A, COLUMN_B)),
        ],
        [1],
        [24],
    )


@dataclass(frozen=True)
class Config:
    block_m: int  # 64 a warpgroup
    block_n: int
    block_k: int
    stages: int  # of the pipeline
    group_m: int = 8  # rows of tiles that run together and share b in L2


_TILES = (
    (128, 256, 64),
    (128, 128, 64),
    (128, 128, 128),
    (64, 256, 64),
    (64, 128, 128),
    (64, 64, 128),
    (64, 32, 128),
)


class Matmul(Kernel):
    archs = ("sm_90",)  # wgmma
    Config = Config

    def refusal(self, call: MatmulCall, config: Config | None = None) -> str | None:
        if call.a.dtype not in _ELEMENT:
            return f"wgmma takes fp16 and bf16, and would round {dtype_name(call.a.dtype)} to tf32"
        if not call.k or not call.n:
            return None  # nothing to describe to TMA
        for name, x in (("a", call.a), ("b", call.b)):
            step = x.stride(0) if layout(x) == "n" else x.stride(1)
            if not x.aligned or step % 8:
                return f"TMA needs {name} to start and step by multiples of 16 bytes, got {x}"
        if call.n % 8:
            return f"TMA stores rows of a multiple of 8, got N = {call.n}"
        if config and (need := _shared(config)) > (limit := gpu(call.a.device).shared_per_block):
            return f"{config} needs {need} bytes of shared memory, a block has {limit}"
        return None

    def default(self, call: MatmulCall) -> Config:
        if call.m > 128:
            return Config(128, 256, 64, 3)
        return Config(64, 64, 128, 4)  # few rows: 18.6 µs at 16 × 4096 × 4096 on an H200, 128 wide 19.3, 32 wide 22.4

    def configs(self, call: MatmulCall) -> list[Config]:
        found = [Config(*tile, stages) for tile in _TILES for stages in (2, 3, 4, 6)]
        return [c for c in found if self.refusal(call, c) is None]

    def estimate(self, call: MatmulCall, config: Config) -> Work:
        return gemm_work(call.m, call.n, call.k, call.a.dtype.itemsize, config.block_m, config.block_n)

    def launches(self, call: MatmulCall, config: Config) -> list[Launch | Host]:
        if not call.k:  # TMA describes no empty tensor
            return [Host(Tensor.zero_, (call.c,))]
        block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
        args = {
            "a_desc": _descriptor(call.a, block_m, block_k), "b_desc": _descriptor(call.b, block_k, block_n),
            "c_desc": _descriptor(call.c, block_m, block_n), "M": call.m, "N": call.n, "K": call.k,
        }  # fmt: skip
        constants = {
            "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "STAGES": config.stages,
            "GROUP_M": config.group_m, "COLUMN_A": layout(call.a) == "t", "COLUMN_B": layout(call.b) == "t",
        }  # fmt: skip
        grid = -(-call.m // block_m) * -(-call.n // block_n)
        return [Launch(_matmul, grid, args, constants, {"num_warps": block_m // 16})]


def _shared(config: Config) -> int:
    """Bytes of the stages, of the tile of c, and of barriers with what aligns the tiles."""
    stages = config.stages * (config.block_m + config.block_n) * config.block_k
    return 2 * (stages + config.block_m * config.block_n) + 1024


def _descriptor(x: Argument, rows: int, columns: int) -> Descriptor:
    """TMA's view of a matrix, in tiles of rows × columns; a column-major one is described as its transpose."""
    (height, width), step, block = x.shape, x.stride(0), (rows, columns)
    if layout(x) == "t":
        (height, width), step, block = (width, height), x.stride(1), (columns, rows)
    shared = gl.NVMMASharedLayout.get_default_for(list(block), _ELEMENT[x.dtype])
    return Descriptor(x._replace(shape=(height, width), strides=(step, 1)), block, shared)


matmul = Matmul()
