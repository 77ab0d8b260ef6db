"""matmul, matmul_add, linear, linear_silu_mul and bmm by TMA and wgmma for sm_90: a large-M and a small-M kernel.

The epilogue works on the sums while they are in registers. hopper_tiles.py cuts the work, hopper_costs.py chooses how.
An operand that TMA cannot address is first copied to rows that it can.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilery.base.launch import Host, Launch
from tilery.base.spec import TensorSpec, Work, dtype_name
from tilery.core.kernel import Kernel
from tilery.hardware.gpu import gpu
from tilery.languages import tensor_maps
from tilery.languages.cuda_source import Source
from tilery.ops.matmul.call import MatmulCall, epilogue_fields, gemm_work
from tilery.ops.matmul.cuda import hopper_costs, hopper_tiles
from tilery.ops.matmul.cuda.hopper_costs import Problem
from tilery.ops.matmul.cuda.operands import Operand, copy_launch, operands

_SOURCE = Path(__file__).with_name("hopper.cu")
_COLUMNS = (32, 48, 64, 96, 128, 160, 192, 224, 256)  # of large-M tiles
_SPLIT_K = (1, 2, 3, 4)
_MULTICASTS = ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4))  # of a and of b
# Of tiles where power limits the clock, which have 128 columns of c: 8192³ took 1584 µs on an H200, 1624 with 256
# columns, and 4096 × 18432 × 7168 1642 and 1685.
_COOLEST = {"multicast_a": 1, "multicast_b": 2, "tma_store": True}
_MN_ROWS = 64  # of an MN-major operand in a tile are a multiple of this
_STAGED_ROWS = 160  # rows of both tiles, up to which a stage of the small-M kernel has two k-blocks


@dataclass(frozen=True)
class Config(hopper_tiles.Config):
    multicast_a: int = 1  # blocks of a cluster with tiles side by side, each of which loads a part of a for all
    multicast_b: int = 1  # those with tiles one above the other, each of which loads a part of b

    @property
    def k_blocks_per_stage(self) -> int:  # type: ignore[override]
        return 1 if self.large_m or self.block_m + self.block_n > _STAGED_ROWS else 2


@dataclass(frozen=True)
class GatedConfig(Config):
    halves = 2


class HopperGemm(Kernel):
    archs = ("sm_90",)
    Config = Config
    gated = False  # whether b is gate and up

    @functools.cached_property
    def choices(self) -> hopper_tiles.Choices:
        """What there are kernels for."""
        large_m = {"block_m": (128,), "block_n": _COLUMNS, "split_k": _SPLIT_K}
        columns = hopper_tiles.small_m_columns(self.Config.halves)
        small_m = {"block_m": hopper_tiles.SMALL_M_ROWS, "block_n": columns, "split_k": hopper_tiles.SPLIT_K}
        if self.gated:
            large_m["split_k"] = small_m["split_k"] = (1,)
        both = {"multicast_a": (1, 2, 4), "multicast_b": (1, 2, 4)}
        return {"large_m": large_m | both, "small_m": small_m | both}

    def refusal(self, call: MatmulCall, config: Config | None = None) -> str | None:
        if call.a.dtype not in (torch.float16, torch.bfloat16):
            return f"wgmma takes fp16 and bf16, and would round {dtype_name(call.a.dtype)} to tf32"
        if (call.bias is not None or call.addend is not None) and call.k == 0:
            return "K must be at least 1: without products there is no kernel to add anything to them"
        if config is None:
            return None
        return self._config_refusal(call, config, *operands(call))

    def _config_refusal(self, call: MatmulCall, config: Config, a: Operand, b: Operand) -> str | None:
        if why := hopper_tiles.refusal(config, self.choices, call.n, call.a.dtype.itemsize, call.a.device):
            return why
        if config.large_m and config.split_k > 1 and call.k < 128 * config.split_k:
            return f"K must be at least {128 * config.split_k} for split_k of {config.split_k}, got {call.k}"
        rows = config.block_m * config.multicast_b  # of a cluster, whose last tile may lie past M: in the next product
        if config.tma_store and call.batch > 1 and call.m % rows:
            return f"tma_store of several products takes M a multiple of {rows}, got {call.m}"
        return _mn_refusal(config, a, b)

    def default(self, call: MatmulCall) -> Config:
        return self.problem(call).ranked()[0]

    def configs(self, call: MatmulCall) -> list[Config]:
        return self.problem(call).candidates()

    def expected_us(self, call: MatmulCall, config: Config) -> float:
        return self.problem(call).expected_us(config)

    def problem(self, call: MatmulCall) -> Problem[Config]:
        a, b = operands(call)
        return Problem(
            self.Config, hopper_costs.fitted("16-bit"), gpu(call.a.device), call.m, call.halves * call.n,
            -(-call.k // 64), _COLUMNS, lambda config: self._config_refusal(call, config, a, b) is None, call.batch,
            large_m_split_k=(1,) if self.gated else _SPLIT_K, multicasts=_MULTICASTS,
            coolest=_COOLEST | {"block_n": 128 * call.halves},
        )  # fmt: skip

    def estimate(self, call: MatmulCall, config: Config) -> Work:
        """The addend is left out: a tile of it costs next to nothing."""
        sizes = call.batch * call.m, call.halves * call.n, call.k, call.a.dtype.itemsize
        return gemm_work(*sizes, config.block_m, config.block_n, config.split_k)

    def workspace(self, call: MatmulCall, config: Config) -> dict[str, TensorSpec]:
        return {each.workspace_name: each.x for each in operands(call) if each.copied_from is not None}

    def launches(self, call: MatmulCall, config: Config) -> list[Launch | Host]:
        if call.k == 0:
            return [Host(Tensor.zero_, (call.out,))]  # there is no map of nothing, and every activation of 0 is 0
        a, b = operands(call)
        launches: list[Launch | Host] = [copy_launch(each) for each in (a, b) if each.copied_from is not None]
        args = _maps(call, config, a, b) | _params(call, a, b, _loaded_rows(call, config, a))
        name = "hopper_gemm" if config.large_m else "hopper_gemm_small_m"
        constants = {"T": call.a.dtype, "A_MN": a.mn_major, "B_MN": b.mn_major} | _constants(config) | _epilogue(call)
        options = {"threads": config.threads, "shared": config.shared}
        grid = config.grid(call.m, call.halves * call.n, call.batch)
        product = Launch(Source(_SOURCE, name), grid, args, constants, options, cluster=config.cluster, pdl=True)
        return [*launches, product]


class GatedHopperGemm(HopperGemm):
    """Gate and up of a column are in one block, so that K is not split."""

    Config = GatedConfig
    gated = True


gemm, gated_gemm = HopperGemm(), GatedHopperGemm()


def _mn_refusal(config: Config, a: Operand, b: Operand) -> str | None:
    """What tiles of MN-major operands cannot be: they come in chunks of 64 rows."""
    if a.mn_major and config.block_m % _MN_ROWS:
        return f"block_m must be a multiple of {_MN_ROWS} where {a.name} is contiguous along M, got {config.block_m}"
    each = config.block_n // config.halves // (1 if config.large_m else config.consumer_warpgroups)
    if b.mn_major and each % _MN_ROWS:
        of = "" if config.large_m else " and as many in each warpgroup"
        return (
            f"a tile must have a multiple of {_MN_ROWS} columns{of} where {b.name} is contiguous along N, got {config}"
        )
    return None


# Launches


def _maps(call: MatmulCall, config: Config, a: Operand, b: Operand) -> dict[str, Any]:
    maps: dict[str, Any] = {
        "a_map": a.tensor_map(_loaded_rows(call, config, a), config.multicast_a),
        "b_map": b.tensor_map(config.block_n // config.halves, config.multicast_b),
    }
    if config.large_m:
        c = call.out._replace(shape=(call.batch * call.m, call.n), strides=(call.n, 1))
        # Without a TMA store the kernel reads no map of c, but its parameter must be one.
        maps["c_map"] = tensor_maps.of_matrix(c, hopper_tiles.TMA_STORE_ROWS) if config.tma_store else maps["a_map"]
    return maps


def _loaded_rows(call: MatmulCall, config: Config, a: Operand) -> int:
    """Rows of a tile of a that TMA loads: of a single small-M tile no more than there are, unless blocks load parts."""
    whole = config.large_m or config.multicast_a > 1 or a.mn_major
    return config.block_m if whole else min(config.block_m, call.m)


def _params(call: MatmulCall, a: Operand, b: Operand, a_rows: int) -> dict[str, Any]:
    """The fields of GemmParams."""
    return {
        "c": call.out, "m": call.m, "n": call.n, "k": call.k, "batch": call.batch,
        "a_batch": a.batches > 1, "b_batch": b.batches > 1, "a_rows": a_rows, **epilogue_fields(call),
    }  # fmt: skip


def _constants(config: Config) -> dict[str, Any]:
    constants = {
        "STAGES": config.stages, "SPLIT_K": config.split_k, "DOWN": config.multicast_b, "ACROSS": config.multicast_a,
        "HALVES": config.halves,
    }  # fmt: skip
    if config.large_m:
        return constants | {"BLOCK_N": config.block_n, "GROUP_M": config.group_m, "TMA_STORE": config.tma_store}
    small_m = {"WARPGROUPS": config.consumer_warpgroups, "WARPGROUP_N": config.warpgroup_n}
    return constants | small_m | {"BLOCK_M": config.block_m, "K_BLOCKS": config.k_blocks_per_stage}


def _epilogue(call: MatmulCall) -> dict[str, Any]:
    """What is compiled into a kernel of its epilogue; a gated product has none besides silu(gate) · up."""
    gated = call.halves > 1
    return {
        "ACT": "none" if gated else call.act, "HAS_BIAS": call.bias is not None, "HAS_ADDEND": call.addend is not None,
        "HAS_ALPHA_BETA": call.alpha is not None, "VECTORS": _reads_vectors(call),
    }  # fmt: skip


def _reads_vectors(call: MatmulCall) -> bool:
    """Whether bias is read in pairs and addend by 16 bytes; if not, both are read element by element."""
    m, n, bias, addend = call.m, call.n, call.bias, call.addend
    if bias is not None and (n % 2 or not bias.aligned):
        return False
    if addend is None:
        return True
    strides = call.addend_strides
    rows = addend.aligned and n % 8 == 0 and (strides.row % 8 == 0 or m <= 1)
    return rows and (strides.column == 1 or n <= 1)
