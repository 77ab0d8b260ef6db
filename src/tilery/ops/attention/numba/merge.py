"""merge_attention and its backward on the CPU: rows in parallel over the cores, one part after another."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import prange

from tilery.base.launch import Launch
from tilery.base.spec import TensorSpec
from tilery.core.kernel import Kernel
from tilery.languages import numba_elements
from tilery.languages.numba_elements import FP32, at, exp, f32, load, rank, store, unrank
from tilery.languages.numba_glue import jit, kernel, threads
from tilery.ops.attention.merge_call import MergeCall, Sizes
from tilery.ops.attention.numba.products import DTYPE_CODES, add_scaled, dot, fill, narrow, widen

NEG_INF = f32(-np.inf)
_LEAST = 2**16  # values from which on the other cores are woken
_NONE = (0, 0, 0, 0)


class Tensors(NamedTuple):
    """Inside of the kernels their addresses, 0 for what is not there."""

    outs: Any
    lses: Any
    out: Any
    lse: Any
    dout: Any = None
    dlse: Any = None
    douts: Any = None
    dlses: Any = None


class Arguments(NamedTuple):
    tensors: Any
    steps: Any  # bytes from one part and row to the next, of each of the tensors
    sizes: Any
    values: int  # of a head
    dtypes: Any  # codes, of parts and of the result


@jit
def _place(tensor, steps, part, row, sizes):
    inner, rest = row % sizes.inner, row // sizes.inner
    middle, outer = rest % sizes.middle, rest // sizes.middle
    by_part, by_outer, by_middle, by_inner = steps
    return tensor + part * by_part + outer * by_outer + middle * by_middle + inner * by_inner


@jit
def _lse(part, row, p):
    return load(_place(p.tensors.lses, p.steps.lses, part, row, p.sizes), 0, FP32)


@jit
def _merge_row(row, acc, line, p):
    top = rank(NEG_INF)
    for part in range(p.sizes.parts):
        top = max(top, rank(_lse(part, row, p)))
    row_max = unrank(top)
    base = f32(0) if row_max == NEG_INF else row_max
    total = f32(0)
    fill(acc, p.values, f32(0))
    for part in range(p.sizes.parts):
        lse = _lse(part, row, p)
        if lse == NEG_INF:
            continue
        weight = exp(lse - base)
        total += weight
        values = _place(p.tensors.outs, p.steps.outs, part, row, p.sizes)
        widen(values, line, p.values, f32(1), p.dtypes[0])
        add_scaled(acc, line, p.values, weight)
    factor = f32(0) if total == 0 else f32(1) / total
    narrow(acc, _place(p.tensors.out, p.steps.out, 0, row, p.sizes), p.values, factor, p.dtypes[1])
    if p.tensors.lse != 0:
        lse = NEG_INF if total == 0 else row_max + f32(np.log(total))
        store(_place(p.tensors.lse, p.steps.lse, 0, row, p.sizes), 0, lse, FP32)


@jit
def _backward_row(row, dout, line, p):
    values, sizes = p.values, p.sizes
    widen(_place(p.tensors.dout, p.steps.dout, 0, row, sizes), dout, values, f32(1), p.dtypes[1])
    widen(_place(p.tensors.out, p.steps.out, 0, row, sizes), line, values, f32(1), p.dtypes[1])
    shift = dot(dout, line, values)
    if p.tensors.dlse != 0:
        shift -= load(_place(p.tensors.dlse, p.steps.dlse, 0, row, sizes), 0, FP32)
    whole = load(_place(p.tensors.lse, p.steps.lse, 0, row, sizes), 0, FP32)
    for part in range(sizes.parts):
        lse, grad = _lse(part, row, p), f32(0)
        target = _place(p.tensors.douts, p.steps.douts, part, row, sizes)
        if lse == NEG_INF:
            fill(line, values, f32(0))
            narrow(line, target, values, f32(1), p.dtypes[0])
        else:
            weight = exp(lse - whole)
            widen(_place(p.tensors.outs, p.steps.outs, part, row, sizes), line, values, f32(1), p.dtypes[0])
            grad = weight * (dot(dout, line, values) - shift)
            narrow(dout, target, values, weight, p.dtypes[0])
        store(_place(p.tensors.dlses, p.steps.dlses, part, row, sizes), 0, grad, FP32)


@jit
def _rows(first, last, memory, backward, tensors, s, sizes, values, dtypes):
    """The arguments by name again: Numba's threads take flat tuples alone."""
    steps = Tensors(s[0:4], s[4:8], s[8:12], s[12:16], s[16:20], s[20:24], s[24:28], s[28:32])
    p = Arguments(Tensors(*tensors), steps, Sizes(*sizes), values, dtypes)
    line = at(memory, values, FP32)
    for row in range(first, last):
        if backward:
            _backward_row(row, memory, line, p)
        else:
            _merge_row(row, memory, line, p)


@kernel
def _merge(threads, memory, pitch, backward, tensors, steps, sizes, values, dtypes):
    """`pitch`: floats of a thread's memory. Both directions are one kernel, which takes less time to compile."""
    rows = sizes[1]
    if threads > 1:
        for i in prange(threads):
            thread = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            first, last, own = (
                thread * rows // threads,
                (thread + 1) * rows // threads,
                at(memory, thread * pitch, FP32),
            )
            _rows(first, last, own, backward, tensors, steps, sizes, values, dtypes)
    else:
        _rows(threads - 1, rows, memory, backward, tensors, steps, sizes, values, dtypes)


@dataclass(frozen=True)
class Config:
    parallel: bool


class Merge(Kernel):
    archs = ("cpu",)
    Config = Config

    def refusal(self, call: MergeCall, config: Config | None = None) -> str | None:
        return numba_elements.refusal(call.outs._replace(dtype=torch.float16))  # one kernel reads every dtype

    def default(self, call: MergeCall) -> Config:
        sizes = call.sizes
        return Config(sizes.rows > 1 and sizes.parts * sizes.rows * call.value_dim >= _LEAST)

    def configs(self, call: MergeCall) -> list[Config]:
        return [Config(parallel=False), Config(parallel=True)]

    def workspace(self, call: MergeCall, config: Config) -> dict[str, TensorSpec]:
        """Memory for each thread's sums and for values as fp32, whole lines of the cache."""
        shape = threads(config.parallel), -(-2 * call.value_dim // 16) * 16
        return {"memory": TensorSpec.contiguous(shape, torch.float32, call.outs.device)}

    def launches(self, call: MergeCall, config: Config) -> list[Launch]:
        return [self.launch(call, config, Tensors(call.outs, call.lses, call.out, call.lse), backward=False)]

    def launch(self, call: MergeCall, config: Config, tensors: Tensors, backward: bool) -> Launch:
        steps: list[int] = []
        for name, x in zip(tensors._fields, tensors):
            by_row = _NONE if x is None else call.lse_steps(x) if "lse" in name else call.steps(x)
            steps += (step * (0 if x is None else x.dtype.itemsize) for step in by_row)
        args = {
            "memory": call.memory, "pitch": call.memory.shape[1], "backward": backward,
            "tensors": tuple(0 if x is None else x for x in tensors), "steps": tuple(steps),
            "sizes": tuple(call.sizes), "values": call.value_dim,
            "dtypes": (DTYPE_CODES[call.outs.dtype], DTYPE_CODES[tensors.out.dtype]),
        }  # fmt: skip
        return Launch(_merge, 1, args, options={"parallel": config.parallel})


class MergeBackward(Merge):
    def launches(self, call: MergeCall, config: Config) -> list[Launch]:
        tensors = Tensors(
            outs=call.outs, lses=call.lses, out=call.result, lse=call.lse, dout=call.dout, dlse=call.dlse,
            douts=call.douts, dlses=call.dlses,
        )  # fmt: skip
        return [self.launch(call, config, tensors, backward=True)]


merge_attention, merge_attention_backward = Merge(), MergeBackward()
