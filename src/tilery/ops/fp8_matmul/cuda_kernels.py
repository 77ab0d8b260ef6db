"""fp8_matmul by TMA and wgmma for sm_90: a large-M and a small-M kernel.

Sums over 128 of K are promoted to fp32 by one warpgroup while another multiplies. Scales come in the stages with the
tiles that they belong to, whatever their strides.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from tilery.base.launch import Host, Launch
from tilery.base.spec import Work, dtype_name
from tilery.core.kernel import Kernel
from tilery.hardware.gpu import gpu
from tilery.languages import tensor_maps
from tilery.languages.cuda_source import Source
from tilery.ops.fp8_matmul.call import Fp8MatmulCall
from tilery.ops.matmul.call import gemm_work
from tilery.ops.matmul.cuda import hopper_costs, hopper_tiles
from tilery.ops.matmul.cuda.hopper_costs import Problem
from tilery.ops.quantize.formats import GROUP

_SOURCE = Path(__file__).with_name("fp8_matmul.cu")
_COLUMNS = (32, 48, 64, 96, 128, 176, 192, 256)  # of large-M tiles
_CHOICES = {
    "large_m": {"block_m": (128,), "block_n": _COLUMNS, "split_k": (1,)},
    "small_m": {
        "block_m": hopper_tiles.SMALL_M_ROWS,
        "block_n": hopper_tiles.SMALL_M_COLUMNS,
        "split_k": hopper_tiles.SPLIT_K,
    },
}


@dataclass(frozen=True)
class Config(hopper_tiles.Config):
    producer_warps = 2  # one for tiles, one for scales
    sum_sets = 2
    other_registers = 32

    @property
    def scale_bytes(self) -> int:  # type: ignore[override]
        return (self.block_m + 4) * 4


class Fp8Matmul(Kernel):
    archs = ("sm_90",)
    Config = Config

    def refusal(self, call: Fp8MatmulCall, config: Config | None = None) -> str | None:
        if why := tensor_maps.refusal("a", call.a) or tensor_maps.refusal("b", call.b):
            return why
        if config is None:
            return None
        if why := hopper_tiles.refusal(config, _CHOICES, call.n, call.c.dtype.itemsize, call.a.device):
            return why
        if config.split_k > (most := max(call.k // GROUP, 1)):
            return f"split_k must be at most {most}, the blocks of {GROUP} in K, got {config.split_k}"
        return None

    def default(self, call: Fp8MatmulCall) -> Config:
        return self.problem(call).ranked()[0]

    def configs(self, call: Fp8MatmulCall) -> list[Config]:
        return self.problem(call).candidates()

    def expected_us(self, call: Fp8MatmulCall, config: Config) -> float:
        return self.problem(call).expected_us(config)

    def problem(self, call: Fp8MatmulCall) -> Problem[Config]:
        return Problem(
            Config, hopper_costs.fitted("fp8"), gpu(call.a.device), call.m, call.n, call.k // GROUP, _COLUMNS,
            lambda config: self.refusal(call, config) is None, itemsize=call.c.dtype.itemsize, group_m=16,
        )  # fmt: skip

    def estimate(self, call: Fp8MatmulCall, config: Config) -> Work:
        sizes = call.m, call.n, call.k, call.a.dtype.itemsize
        return gemm_work(*sizes, config.block_m, config.block_n, config.split_k)

    def launches(self, call: Fp8MatmulCall, config: Config) -> list[Launch | Host]:
        if call.k == 0:
            return [Host(Tensor.zero_, (call.c,))]  # there are no scales to read and no map of nothing
        a, b, c = call.a, call.b, call.c
        maps = {"a_map": tensor_maps.of_matrix(a, config.block_m), "b_map": tensor_maps.of_matrix(b, config.block_n)}
        if config.large_m:
            # Without a TMA store the kernel reads no map of c, but its parameter must be one.
            stored = tensor_maps.of_matrix(c, hopper_tiles.TMA_STORE_ROWS) if config.tma_store else maps["a_map"]
            maps["c_map"] = stored
        args = maps | _scales("a", call.a_scale) | _scales("b", call.b_scale)
        args |= {"c": c, "m": call.m, "n": call.n, "k": call.k}
        source = Source(_SOURCE, "fp8_matmul" if config.large_m else "fp8_matmul_small_m")
        types = {"TA": dtype_name(a.dtype), "TB": dtype_name(b.dtype), "T": c.dtype}
        options, grid = {"threads": config.threads, "shared": config.shared}, config.grid(call.m, call.n)
        constants = types | _constants(config)
        return [Launch(source, grid, args, constants, options, cluster=config.cluster, pdl=True)]


def _scales(operand: str, scale: Any) -> dict[str, Any]:
    row, column = scale.strides
    return {f"{operand}_scale": scale, f"{operand}_scale_row_stride": row, f"{operand}_scale_col_stride": column}


def _constants(config: Config) -> dict[str, Any]:
    if config.large_m:
        parts = 1 if config.block_n <= 128 else 2
        sizes = {"N_PARTS": parts, "WGMMA_N": config.block_n // parts, "STAGES": config.stages}
        return sizes | {"GROUP_M": config.group_m, "TMA_STORE": config.tma_store}
    sizes = {"BLOCK_M": config.block_m, "WARPGROUPS": config.consumer_warpgroups, "WARPGROUP_N": config.warpgroup_n}
    return sizes | {"STAGES": config.stages, "SPLIT_K": config.split_k}


fp8_matmul = Fp8Matmul()
