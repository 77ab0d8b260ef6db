"""merge_attention and its backward in Triton: a program takes some rows whole, one part after another."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from tilery.base.integers import ceil_div, next_power_of_2
from tilery.base.launch import Launch
from tilery.core.kernel import Kernel
from tilery.hardware.gpu import ARCHS
from tilery.languages.triton_glue import pdl_wait
from tilery.ops.attention.merge_call import MergeCall, Steps

_IN_FLIGHT = 4  # parts whose values are asked for at once
_NONE = Steps(0, 0, 0, 0)


class Rows(NamedTuple):
    """A tensor with a value, or a head of values, for each row."""

    ptr: Any
    steps: Steps


@triton.jit
def _places(row, sizes, steps):
    """Elements from the first of a part to rows [ROWS], in 64 bits."""
    inner, rest = row % sizes.inner, row // sizes.inner
    middle, outer = rest % sizes.middle, rest // sizes.middle
    return outer * steps.outer + middle * steps.middle + inner * steps.inner


@triton.jit
def _own_rows(sizes, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return row, row < sizes.rows


@triton.jit
def _load_values(x, at, mask, column, VALUE_DIM: tl.constexpr):
    """Heads of rows in fp32, zeros where they are masked."""
    mask = mask[:, None] & (column < VALUE_DIM)[None, :]
    return tl.load(x.ptr + (at[:, None] + column[None, :]), mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store_values(x, at, values, mask, column, VALUE_DIM: tl.constexpr):
    mask = mask[:, None] & (column < VALUE_DIM)[None, :]
    tl.store(x.ptr + (at[:, None] + column[None, :]), values, mask=mask)


@triton.jit
def _merge(
    outs, lses, out, lse, sizes,
    VALUE_DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, IN_FLIGHT: tl.constexpr,
):  # fmt: skip
    pdl_wait()
    row, inside = _own_rows(sizes, ROWS)
    column = tl.arange(0, BLOCK)
    values_at, lse_at = _places(row, sizes, outs.steps), _places(row, sizes, lses.steps)
    part_step, lse_step = tl.cast(outs.steps.part, tl.int64), tl.cast(lses.steps.part, tl.int64)
    row_max = tl.full((ROWS,), -float("inf"), tl.float32)
    for part in range(sizes.parts):
        found = tl.load(lses.ptr + (lse_at + part * lse_step), mask=inside, other=-float("inf"))
        row_max = tl.maximum(row_max, found)
    finite = tl.where(row_max == -float("inf"), 0.0, row_max)
    acc, total = tl.zeros((ROWS, BLOCK), tl.float32), tl.zeros((ROWS,), tl.float32)
    for first in range(0, sizes.parts, IN_FLIGHT):
        for i in tl.static_range(IN_FLIGHT):
            part = first + i
            there = inside & (part < sizes.parts)
            found = tl.load(lses.ptr + (lse_at + part * lse_step), mask=there, other=-float("inf"))
            values = _load_values(
                outs, values_at + part * part_step, there & (found != -float("inf")), column, VALUE_DIM
            )
            p = tl.exp(found - finite)
            total += p
            acc += p[:, None] * values
    inverse = tl.where(total == 0, 0.0, 1.0 / tl.where(total == 0, 1.0, total))
    _store_values(out, _places(row, sizes, out.steps), acc * inverse[:, None], inside, column, VALUE_DIM)
    if lse.ptr is not None:
        tl.store(lse.ptr + _places(row, sizes, lse.steps), row_max + tl.log(total), mask=inside)


@triton.jit
def _merge_backward(
    dout, dlse, outs, lses, result, lse, douts, dlses, sizes,
    VALUE_DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    pdl_wait()
    row, inside = _own_rows(sizes, ROWS)
    column = tl.arange(0, BLOCK)
    dout_rows = _load_values(dout, _places(row, sizes, dout.steps), inside, column, VALUE_DIM)
    result_rows = _load_values(result, _places(row, sizes, result.steps), inside, column, VALUE_DIM)
    shift = tl.sum(dout_rows * result_rows, axis=1)
    if dlse.ptr is not None:
        shift -= tl.load(dlse.ptr + _places(row, sizes, dlse.steps), mask=inside, other=0.0)
    whole = tl.load(lse.ptr + _places(row, sizes, lse.steps), mask=inside, other=0.0)
    values_at, lse_at = _places(row, sizes, outs.steps), _places(row, sizes, lses.steps)
    douts_at, dlses_at = _places(row, sizes, douts.steps), _places(row, sizes, dlses.steps)
    wide = tl.full((), 1, tl.int64)
    for part in range(sizes.parts):
        found = tl.load(lses.ptr + (lse_at + part * wide * lses.steps.part), mask=inside, other=-float("inf"))
        there = inside & (found != -float("inf"))
        p = tl.where(there, tl.exp(found - whole), 0.0)
        values = _load_values(outs, values_at + part * wide * outs.steps.part, there, column, VALUE_DIM)
        grads = tl.where(there, p * (tl.sum(dout_rows * values, axis=1) - shift), 0.0)
        tl.store(dlses.ptr + (dlses_at + part * wide * dlses.steps.part), grads, mask=inside)
        scaled = tl.where(there[:, None], p[:, None] * dout_rows, 0.0)
        _store_values(douts, douts_at + part * wide * douts.steps.part, scaled, inside, column, VALUE_DIM)


@dataclass(frozen=True)
class Config:
    rows: int  # of a program
    num_warps: int

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.num_warps}


class Merge(Kernel):
    archs = ARCHS
    Config = Config
    held = 1024  # values of a tile: 8 a thread

    def refusal(self, call: MergeCall, config: Config | None = None) -> str | None:
        if config is not None and config.rows & (config.rows - 1):
            return f"rows must be a power of two, got {config.rows}"
        return None

    def default(self, call: MergeCall) -> Config:
        return Config(max(self.held // _block(call), 1), num_warps=4)

    def configs(self, call: MergeCall) -> list[Config]:
        sizes = dict.fromkeys(max(held // _block(call), 1) for held in (512, 1024, 2048, 4096))
        return [Config(rows, warps) for rows in sizes for warps in (2, 4, 8)]

    def launches(self, call: MergeCall, config: Config) -> list[Launch]:
        lse = _NONE if call.lse is None else call.lse_steps(call.lse)
        args = {
            "outs": Rows(call.outs, call.steps(call.outs)), "lses": Rows(call.lses, call.lse_steps(call.lses)),
            "out": Rows(call.out, call.steps(call.out)), "lse": Rows(call.lse, lse), "sizes": call.sizes,
        }  # fmt: skip
        in_flight = min(next_power_of_2(max(call.sizes.parts, 1)), _IN_FLIGHT)
        return self._launches(call, config, _merge, args, {"IN_FLIGHT": in_flight})

    def _launches(
        self, call: MergeCall, config: Config, kernel: Any, args: dict[str, Any], more: dict[str, int]
    ) -> list[Launch]:
        constants = {"VALUE_DIM": call.value_dim, "BLOCK": _block(call), "ROWS": config.rows}
        grid = ceil_div(call.sizes.rows, config.rows)
        return [Launch(kernel, grid, args, constants | more, config.options, pdl=True)]


class MergeBackward(Merge):
    def launches(self, call: MergeCall, config: Config) -> list[Launch]:
        values = {"dout": call.dout, "outs": call.outs, "result": call.result, "douts": call.douts}
        sums = {"dlse": call.dlse, "lses": call.lses, "lse": call.lse, "dlses": call.dlses}
        args = {name: Rows(x, call.steps(x)) for name, x in values.items()}
        args |= {name: Rows(x, _NONE if x is None else call.lse_steps(x)) for name, x in sums.items()}
        return self._launches(call, config, _merge_backward, args | {"sizes": call.sizes}, {})


def _block(call: MergeCall) -> int:
    return next_power_of_2(call.value_dim)


merge_attention, merge_attention_backward = Merge(), MergeBackward()
