"""attention_sinks_backward in Triton: delta of every row, then a program for each head adds up its rows in order."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tilery.base.integers import ceil_div, next_power_of_2
from tilery.base.launch import Host, Launch, fill
from tilery.base.spec import TensorSpec
from tilery.core.kernel import Kernel
from tilery.hardware.gpu import ARCHS
from tilery.ops.attention.call import SinksBackwardCall
from tilery.ops.attention.triton.backward_kernel import RowSums, Strided, backward_delta
from tilery.ops.attention.triton.softmax import LOG2E

_ROWS = 32  # of a program that computes delta
_MAX_SEQUENCES = 65535  # along a grid's third axis


@triton.jit
def _sum_sinks(sums, sinks_ptr, dsinks_ptr, rows, tokens, BLOCK: tl.constexpr):
    """Every BLOCK-th row has a sum of its own; these are added up at the end."""
    head = tl.program_id(0).to(tl.int64)
    sink = tl.load(sinks_ptr + head)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, rows, BLOCK):
        row = first + tl.arange(0, BLOCK).to(tl.int64)
        place = row // tokens * sums.sequence + head * sums.head + row % tokens
        lse = tl.load(sums.lse_ptr + place, mask=row < rows, other=-float("inf"))
        delta = tl.load(sums.delta_ptr + place, mask=row < rows, other=0.0)
        seen = lse != -float("inf")
        p = tl.exp2((sink - tl.where(seen, lse, 0.0)) * LOG2E)
        total -= tl.where(seen, p * delta, 0.0)
    tl.store(dsinks_ptr + head, tl.sum(total, 0))


@dataclass(frozen=True)
class Config:
    block: int  # rows of a head at a time
    num_warps: int

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.num_warps}


class SinksBackward(Kernel):
    archs = ARCHS
    Config = Config

    def refusal(self, call: SinksBackwardCall, config: Config | None = None) -> str | None:
        if call.batch > _MAX_SEQUENCES:
            return f"takes up to {_MAX_SEQUENCES} sequences, got {call.batch}"
        if config is not None and config.block & (config.block - 1):
            return f"block must be a power of two, got {config.block}"
        return None

    def default(self, call: SinksBackwardCall) -> Config:
        return Config(1024, num_warps=4)

    def configs(self, call: SinksBackwardCall) -> list[Config]:
        return [Config(block, warps) for block in (512, 1024, 2048, 4096) for warps in (4, 8)]

    def workspace(self, call: SinksBackwardCall, config: Config) -> dict[str, TensorSpec]:
        return {"delta": TensorSpec.contiguous(call.lse.shape, torch.float32, call.lse.device)}

    def launches(self, call: SinksBackwardCall, config: Config) -> list[Launch | Host]:
        if not call.batch * call.tokens:
            return [fill(call.dsinks, 0.0)]
        steps = call.lse_strides
        dout, result = (Strided(x, *call.strides(x)) for x in (call.dout, call.result))
        args = {"dout": dout, "out": result, "dlse_ptr": call.dlse, "delta": Strided(call.delta, *steps)}
        constants = {"VALUE_DIM": call.value_dim, "BLOCK": next_power_of_2(call.value_dim), "ROWS": _ROWS}
        grid = ceil_div(call.tokens, _ROWS), call.heads, call.batch
        found = [Launch(backward_delta, grid, args | {"tokens": call.tokens}, constants, {"num_warps": 4})]
        args = {
            "sums": RowSums(call.lse, call.delta, steps.sequence, steps.head), "sinks_ptr": call.sinks,
            "dsinks_ptr": call.dsinks, "rows": call.batch * call.tokens, "tokens": call.tokens,
        }  # fmt: skip
        return [*found, Launch(_sum_sinks, call.heads, args, {"BLOCK": config.block}, config.options)]


attention_sinks_backward = SinksBackward()
