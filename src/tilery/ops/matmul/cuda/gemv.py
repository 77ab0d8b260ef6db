"""Products of up to eight rows without tensor cores, for every architecture: each warp has a few columns of c.

With so few rows a product takes as long as its weights take to come from memory. Warps that read them straight on
need no pipeline, which takes time to fill and to drain.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tilery.base.integers import ceil_div, next_power_of_2
from tilery.base.launch import Launch
from tilery.base.spec import Work, dtype_name
from tilery.core.kernel import Kernel
from tilery.hardware.gpu import ARCHS
from tilery.languages.cuda_source import Source
from tilery.ops.matmul.call import MatmulCall, epilogue_fields, gemm_work, warps_of_k

_GEMV = Source(Path(__file__).with_name("gemv.cu"), "gemv")
_MOST_ROWS = 8
_VALUES = 8  # of 16 bits in 16 bytes
_WARPS = 8  # of a block
_LEAST_K = 256  # of a part of K: a load of each thread of a warp
_LOADS = 4  # that a thread has in flight


@dataclass(frozen=True)
class Config:
    columns: int  # of c that a warp has
    split_k: int  # warps that share them, each with a part of K
    in_flight: int  # loads of 16 bytes of each of these columns that a thread has in flight


class Gemv(Kernel):
    archs = ARCHS
    Config = Config

    def refusal(self, call: MatmulCall, config: Config | None = None) -> str | None:
        if call.a.dtype not in (torch.float16, torch.bfloat16):
            return f"takes fp16 and bf16, got {dtype_name(call.a.dtype)}"
        if call.m > _MOST_ROWS:
            return f"takes at most {_MOST_ROWS} rows, got {call.m}"
        if call.k == 0 or call.k % _VALUES:
            return f"takes K a multiple of {_VALUES}, got {call.k}"
        lines = (call.m, *call.a_strides), (call.halves * call.n, *call.b_strides[::-1])
        for i, (name, x) in enumerate(zip(call.user_names, (call.a, call.b))):
            if not (x.aligned and call.batch_strides[i] % _VALUES == 0 and _are_vectors(*lines[i], call.k)):
                return f"takes {name} contiguous along K, with lines that start at multiples of 16 bytes"
        return None if config is None else _config_refusal(config, call)

    def default(self, call: MatmulCall) -> Config:
        """The best on an H200, or within 6 % of it, of the 44 configs of each of 12 products of one and two rows."""
        fewest = next(s for s in (8, 4, 2, 1) if s == 1 or call.k >= s * _LEAST_K)
        return Config(_LOADS // call.halves, warps_of_k(call.k) or fewest, 1)

    def configs(self, call: MatmulCall) -> list[Config]:
        found = (Config(c, s, f) for c in (1, 2, 4) for s in (1, 2, 4, 8) for f in (1, 2, 4, 8))
        return [c for c in found if self.refusal(call, c) is None]

    def estimate(self, call: MatmulCall, config: Config) -> Work:
        columns = config.columns * _WARPS // config.split_k
        return gemm_work(call.batch * call.m, call.halves * call.n, call.k, call.a.dtype.itemsize, call.m, columns)

    def launches(self, call: MatmulCall, config: Config) -> list[Launch]:
        blocks = ceil_div(call.n, config.columns * _WARPS // config.split_k)
        constants = {
            "T": call.a.dtype, "ROWS": _rows(call), "COLUMNS": config.columns, "WARPS": _WARPS,
            "SPLIT_K": config.split_k, "IN_FLIGHT": config.in_flight, "HALVES": call.halves,
            "ACT": "none" if call.halves > 1 else call.act, "HAS_BIAS": call.bias is not None,
            "HAS_ADDEND": call.addend is not None, "HAS_ALPHA_BETA": call.alpha is not None,
        }  # fmt: skip
        return [Launch(_GEMV, blocks * call.batch, _params(call), constants, {"threads": 32 * _WARPS}, pdl=True)]


gemv = Gemv()


def _rows(call: MatmulCall) -> int:
    """Rows of a that the kernel is compiled for."""
    return next_power_of_2(max(call.m, 1))


def _are_vectors(count: int, stride: int, along: int, k: int) -> bool:
    """Whether `count` lines along K begin at multiples of 16 bytes, if the first does."""
    return (along == 1 or k <= 1) and (count <= 1 or stride % _VALUES == 0)


def _config_refusal(config: Config, call: MatmulCall) -> str | None:
    columns, split_k, in_flight = config.columns, config.split_k, config.in_flight
    if any(x not in (1, 2, 4, 8) for x in (columns, split_k, in_flight)):
        return f"columns, split_k and in_flight must be 1, 2, 4 or 8, got {config}"
    if columns * _rows(call) > 32:
        return f"a warp has at most 32 values of c, got {config} for {_rows(call)} rows"
    if columns * call.halves * in_flight > 16:
        return f"at most 16 loads of a thread fit its registers, got {config}"
    return None


def _params(call: MatmulCall) -> dict[str, Any]:
    """The fields of GemvParams."""
    a_batch, b_batch = call.batch_strides
    return {
        "a": call.a, "b": call.b, "c": call.out, "m": call.m, "n": call.n, "k": call.k,
        "a_stride": call.a_strides.row, "b_stride": call.b_strides.column, "a_batch": a_batch, "b_batch": b_batch,
        **epilogue_fields(call),
    }  # fmt: skip
