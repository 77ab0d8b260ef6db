"""grouped_matmul in CUDA C++ for Hopper, by TMA and wgmma: for groups of many rows."""

from dataclasses import dataclass
from pathlib import Path

import torch

from tilery.base.integers import ceil_div
from tilery.base.launch import Launch, Persistent
from tilery.base.spec import Work, dtype_name
from tilery.core.kernel import Kernel
from tilery.hardware.gpu import gpu
from tilery.languages.cuda_source import Source
from tilery.ops.matmul.call import GroupedCall, batched_work
from tilery.ops.matmul.cuda.operands import Operand, addressed

_SOURCE = Source(Path(__file__).with_name("grouped.cu"), "hopper_grouped_gemm")
_BLOCK_M, _THREADS = 128, 384
_COLUMNS = (64, 128, 192, 256)
_MOST_GROUPS = 4096  # whose ends shared memory holds
_ALIGNMENT, _BARRIERS, _MAX_STAGES = 1024, 16, 8


@dataclass(frozen=True)
class Config:
    block_n: int  # columns of a tile, which has 128 rows
    stages: int


class GroupedHopperGemm(Kernel):
    archs = ("sm_90",)
    Config = Config

    def refusal(self, call: GroupedCall, config: Config | None = None) -> str | None:
        if call.a.dtype not in (torch.float16, torch.bfloat16):
            return f"wgmma takes fp16 and bf16, and would round {dtype_name(call.a.dtype)} to tf32"
        if not (call.k and 1 <= call.groups <= _MOST_GROUPS):
            return f"takes K of at least 1 and 1 to {_MOST_GROUPS} groups, got K {call.k} and {call.groups} groups"
        if (call.most_tiles(_BLOCK_M) + call.groups) * ceil_div(call.n, min(_COLUMNS)) >= 2**31:
            return f"numbers tiles in 32 bits, got {call.rows} rows of {call.n} columns"
        for given, dimension in zip(_operands(call), "MN"):
            if addressed(given) is None:
                return (
                    f"{given.name} must be contiguous along K or {dimension}, with lines that start at multiples of 16 "
                    f"bytes, for TMA to load it, got {given.x}"
                )
        return None if config is None else self._config_refusal(call, config)

    def _config_refusal(self, call: GroupedCall, config: Config) -> str | None:
        if config.block_n not in _COLUMNS:
            return f"block_n must be one of {', '.join(map(str, _COLUMNS))}, got {config.block_n}"
        most = _most_stages(call, config.block_n)
        if not 2 <= config.stages <= most:
            return f"stages must be 2 to {most} for shared memory to hold them, got {config.stages}"
        return None

    def default(self, call: GroupedCall) -> Config:
        """The widest tile of which there is one for every SM, or the narrowest."""
        blocks = call.tiles_expected(_BLOCK_M)
        wide = (n for n in reversed(_COLUMNS) if blocks * ceil_div(call.n, n) >= gpu(call.a.device).sms)
        block_n = next(wide, min(_COLUMNS))
        return Config(block_n, _most_stages(call, block_n))

    def configs(self, call: GroupedCall) -> list[Config]:
        return [Config(block_n, _most_stages(call, block_n)) for block_n in _COLUMNS]

    def estimate(self, call: GroupedCall, config: Config) -> Work:
        tiles = call.tiles_expected(_BLOCK_M) * ceil_div(call.n, config.block_n)
        rows = min(call.rows_per_group, _BLOCK_M)
        return batched_work(tiles, rows, call.n, call.k, call.a.dtype.itemsize, _BLOCK_M, config.block_n)

    def launches(self, call: GroupedCall, config: Config) -> list[Launch]:
        a, b = (addressed(given) for given in _operands(call))
        assert a is not None and b is not None  # else it is refused
        if not call.rows or not call.n:
            return []
        args = {
            "a_map": a.tensor_map(_BLOCK_M, 1), "b_map": b.tensor_map(config.block_n, 1), "c": call.c,
            "offsets": call.offsets, "rows": call.rows, "n": call.n, "k": call.k, "groups": call.groups,
        }  # fmt: skip
        constants = {
            "T": call.a.dtype, "A_MN": a.mn_major, "B_MN": b.mn_major, "BLOCK_N": config.block_n,
            "STAGES": config.stages,
        }  # fmt: skip
        options = {"threads": _THREADS, "shared": _shared(call, config)}
        grid = Persistent(call.most_tiles(_BLOCK_M) * ceil_div(call.n, config.block_n))
        return [Launch(_SOURCE, grid, args, constants, options, pdl=True)]


def _operands(call: GroupedCall) -> tuple[Operand, Operand]:
    """a [T, K], and b [G, N, K] as it lies in memory."""
    (row, k), (group, b_k, column) = call.a.strides, call.b.strides
    a = Operand("a", call.a, 1, call.rows, call.k, 0, row, k)
    return a, Operand("b", call.b, call.groups, call.n, call.k, group, column, b_k)


def _shared(call: GroupedCall, config: Config) -> int:
    return _fixed_bytes(call) + config.stages * _stage_bytes(config.block_n)


def _fixed_bytes(call: GroupedCall) -> int:
    """To align the stages, and the ends of groups and of their tiles and a flag beside them."""
    return _ALIGNMENT + (call.groups + 3) // 2 * 16


def _stage_bytes(block_n: int) -> int:
    return (_BLOCK_M + block_n) * 128 + _BARRIERS


def _most_stages(call: GroupedCall, block_n: int) -> int:
    card = gpu(call.a.device)
    room = card.shared_per_block - card.reserved_shared - _fixed_bytes(call)
    return min(room // _stage_bytes(block_n), _MAX_STAGES)


grouped_matmul = GroupedHopperGemm()
