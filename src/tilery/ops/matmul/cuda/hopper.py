"""matmul, matmul_add, linear and linear_silu_mul by TMA and wgmma for sm_90: a large-M and a small-M kernel.

The epilogue works on the sums while they are in registers. hopper_tiles.py cuts the work.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilery.base.launch import Host, Launch
from tilery.base.spec import Work, dtype_name
from tilery.core.kernel import Kernel
from tilery.hardware.gpu import gpu
from tilery.languages import tensor_maps
from tilery.languages.cuda_source import Source
from tilery.ops.matmul.call import MatmulCall, gemm_work
from tilery.ops.matmul.cuda import hopper_tiles
from tilery.ops.matmul.cuda.hopper_tiles import ConfigSpace

_SOURCE = Path(__file__).with_name("hopper.cu")
_MANY = 1024  # rows: beyond, blocks multicast b; up to here, the large-M kernel may split K
_COLUMNS = (*hopper_tiles.NARROW, 128, 160, 192, 224, 256)  # of large-M tiles
_LARGE_M_SPLIT_K = (2, 3, 4)


@dataclass(frozen=True)
class Config(hopper_tiles.Config):
    multicast: int = 1  # blocks of a cluster, one above the other, that load parts of b for all of them; large_m alone

    @property
    def k_blocks_per_stage(self) -> int:  # type: ignore[override]
        return 1 if self.large_m else 2


@dataclass(frozen=True)
class GatedConfig(Config):
    halves = 2


class HopperGemm(Kernel):
    archs = ("sm_90",)
    Config = Config
    gated = False  # whether b is gate and up

    @property
    def choices(self) -> hopper_tiles.Choices:
        """What there are kernels for."""
        large_m = {"block_m": (128,), "block_n": _COLUMNS, "split_k": (1, *_LARGE_M_SPLIT_K), "multicast": (1, 2)}
        columns = hopper_tiles.small_m_columns(self.Config.halves)
        small_m = {"block_m": hopper_tiles.SMALL_M_ROWS, "block_n": columns, "split_k": hopper_tiles.SPLIT_K}
        if self.gated:
            large_m["split_k"] = small_m["split_k"] = (1,)
        return {"large_m": large_m, "small_m": small_m | {"multicast": (1,)}}

    def refusal(self, call: MatmulCall, config: Config | None = None) -> str | None:
        if call.a.dtype not in (torch.float16, torch.bfloat16):
            return f"wgmma takes fp16 and bf16, and would round {dtype_name(call.a.dtype)} to tf32"
        if why := _operand_refusal(call) or _epilogue_refusal(call):
            return why
        if config is None:
            return None
        if why := hopper_tiles.refusal(config, self.choices, call.n, call.a.dtype.itemsize, call.a.device):
            return why
        if config.large_m and config.split_k > 1 and call.k < 128 * config.split_k:
            return f"K must be at least {128 * config.split_k} for split_k of {config.split_k}, got {call.k}"
        return None

    def default(self, call: MatmulCall) -> Config:
        many = {"multicast": 2, "group_m": 4} if call.m > _MANY else {}
        return self._space(call).default({"tma_store": call.n % 8 == 0} | many)

    def configs(self, call: MatmulCall) -> list[Config]:
        multicasts = (1, 2) if call.m > 128 else (1,)
        options = [{"tma_store": tma_store, "multicast": m} for m in multicasts for tma_store in (True, False)]
        found = [self.default(call), *self._space(call).candidates(options)]
        return [c for c in dict.fromkeys(found) if self.refusal(call, c) is None]

    def _space(self, call: MatmulCall) -> ConfigSpace[Config]:
        split_k = _LARGE_M_SPLIT_K if call.m <= _MANY and not self.gated else ()
        sizes = call.m, call.halves * call.n, call.k // 128
        return ConfigSpace(self.Config, gpu(call.a.device), *sizes, _COLUMNS, large_m_split_k=split_k)

    def estimate(self, call: MatmulCall, config: Config) -> Work:
        """The addend is left out: a tile of it costs next to nothing."""
        sizes = call.m, call.halves * call.n, call.k, call.a.dtype.itemsize
        return gemm_work(*sizes, config.block_m, config.block_n, config.split_k)

    def launches(self, call: MatmulCall, config: Config) -> list[Launch | Host]:
        if call.k == 0:
            return [Host(Tensor.zero_, (call.out,))]  # there is no map of nothing, and every activation of 0 is 0
        name, args, constants = "hopper_silu_mul" if self.gated else "hopper_matmul", _args(call, config), {}
        if not self.gated and _has_epilogue(call):
            name, constants = "hopper_linear", _epilogue_constants(call)
            args |= _epilogue_args(call)
        if not config.large_m:
            name += "_small_m"
        constants |= _constants(call, config)
        options, grid = {"threads": config.threads, "shared": config.shared}, config.grid(call.m, call.halves * call.n)
        return [Launch(Source(_SOURCE, name), grid, args, constants, options, cluster=config.cluster, pdl=True)]


class GatedHopperGemm(HopperGemm):
    """Gate and up of a column are in one block, so that K is not split."""

    Config = GatedConfig
    gated = True


gemm, gated_gemm = HopperGemm(), GatedHopperGemm()


# Refusals


def _operand_refusal(call: MatmulCall) -> str | None:
    for name, x, matrix in zip(call.user_names, (call.a, call.b), _k_major(call)):
        if matrix.strides[1] != 1 and call.k > 1 and matrix.shape[0]:
            return f"{name} must have K contiguous, got strides {list(x.strides)}"
    names = call.user_names
    a, b = _k_major(call)
    return tensor_maps.refusal(names[0], a) or tensor_maps.refusal(names[1], b)


def _epilogue_refusal(call: MatmulCall) -> str | None:
    m, n, bias, addend = call.m, call.n, call.bias, call.addend
    if (bias is not None or addend is not None) and call.k == 0:
        return "K must be at least 1: without products there is no kernel to add anything to them"
    if bias is not None and (n % 2 or not bias.aligned):
        return f"bias must start at a multiple of 16 bytes and have an even size, to be read in pairs, got {n}"
    if addend is None or n == 0:
        return None
    strides = call.addend_strides
    even = addend.aligned and n % 8 == 0 and (strides.row % 8 == 0 or m <= 1)
    if not even or (strides.column != 1 and n > 1):
        rule = "must be contiguous, start at multiples of 16 bytes and be of 8 values each"
        came = f"{list(addend.shape)} with strides {list(addend.strides)}"
        return f"rows of {call.user_names[2]} {rule}, got {came}"
    return None


# Launches


def _k_major(call: MatmulCall) -> tuple[Any, Any]:
    """a as [M, K], and b as [halves · N, K]."""
    a = call.a._replace(shape=(call.m, call.k), strides=tuple(call.a_strides))
    b = call.b._replace(shape=(call.halves * call.n, call.k), strides=tuple(call.b_strides)[::-1])
    return a, b


def _args(call: MatmulCall, config: Config) -> dict[str, Any]:
    a, b = _k_major(call)
    args: dict[str, Any] = {
        "a_map": tensor_maps.of_matrix(a, config.block_m),
        "b_map": tensor_maps.of_matrix(b, config.block_n // max(config.multicast, config.halves)),
    }
    if config.large_m:
        c = call.out._replace(shape=(call.m, call.n), strides=(call.n, 1))
        # Without a TMA store the kernel reads no map of c, but its parameter must be one.
        args["c_map"] = tensor_maps.of_matrix(c, hopper_tiles.TMA_STORE_ROWS) if config.tma_store else args["a_map"]
    return args | {"c": call.out, "m": call.m, "n": call.n, "k": call.k}


def _constants(call: MatmulCall, config: Config) -> dict[str, Any]:
    constants = {"T": call.a.dtype, "STAGES": config.stages, "SPLIT_K": config.split_k}
    if config.large_m:
        large_m = {"BLOCK_N": config.block_n, "GROUP_M": config.group_m, "MULTICAST": config.multicast}
        return constants | large_m | {"TMA_STORE": config.tma_store}
    small_m = {"WARPGROUPS": config.consumer_warpgroups, "WARPGROUP_N": config.warpgroup_n}
    return constants | {"BLOCK_M": config.block_m} | small_m


def _has_epilogue(call: MatmulCall) -> bool:
    return call.act != "none" or not call.bias is call.addend is call.alpha is None


def _epilogue_constants(call: MatmulCall) -> dict[str, Any]:
    """What is compiled into a kernel with an epilogue."""
    return {
        "ACT": call.act, "HAS_BIAS": call.bias is not None, "HAS_ADDEND": call.addend is not None,
        "HAS_ALPHA_BETA": call.alpha is not None,
    }  # fmt: skip


def _epilogue_args(call: MatmulCall) -> dict[str, Any]:
    bias, addend = (0 if x is None else x for x in (call.bias, call.addend))
    alpha, beta = (1.0 if x is None else x for x in (call.alpha, call.beta))
    stride = call.addend_strides.row
    return {"bias": bias, "addend": addend, "addend_stride": stride, "alpha": alpha, "beta": beta}
