"""attention_sinks_backward on the CPU: a core takes a head and adds up its rows in order."""

from dataclasses import dataclass

import numpy as np
import torch
from numba import prange

from tilery.base.launch import Launch
from tilery.base.spec import TensorSpec
from tilery.core.kernel import Kernel
from tilery.languages import numba_elements
from tilery.languages.numba_elements import FP32, at, exp, f32, load, store
from tilery.languages.numba_glue import jit, kernel, threads
from tilery.ops.attention.call import SinksBackwardCall
from tilery.ops.attention.numba.blocks import NEG_INF, address
from tilery.ops.attention.numba.products import DTYPE_CODES, dot, widen

_LEAST = 2**16  # values from which on the other cores are woken


@jit
def _heads(first, last, memory, tensors, strides, sizes):
    dout, dlse, result, lse, sinks, dsinks = tensors
    batch, tokens, values, dtype = sizes
    line = at(memory, values, FP32)
    for head in range(first, last):
        sink, total = load(sinks, head, FP32), 0.0  # in fp64, as there may be millions
        for row in range(batch * tokens):
            sequence, token = row // tokens, row % tokens
            known = load(address(lse, strides[6:9], sequence, token, head), 0, FP32)
            if known == NEG_INF:
                continue
            widen(address(dout, strides[0:3], sequence, token, head), memory, values, f32(1), dtype)
            widen(address(result, strides[3:6], sequence, token, head), line, values, f32(1), dtype)
            delta = dot(memory, line, values)
            if dlse != 0:
                delta -= load(address(dlse, strides[6:9], sequence, token, head), 0, FP32)
            total -= exp(sink - known) * delta
        store(dsinks, head, f32(total), FP32)


@kernel
def _sinks(threads, memory, pitch, heads, tensors, strides, sizes):
    """`pitch`: floats of a thread's memory."""
    if threads > 1:
        for i in prange(threads):
            thread = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            first, last = thread * heads // threads, (thread + 1) * heads // threads
            _heads(first, last, at(memory, thread * pitch, FP32), tensors, strides, sizes)
    else:
        _heads(threads - 1, heads, memory, tensors, strides, sizes)


@dataclass(frozen=True)
class Config:
    parallel: bool


class SinksBackward(Kernel):
    archs = ("cpu",)
    Config = Config

    def refusal(self, call: SinksBackwardCall, config: Config | None = None) -> str | None:
        return numba_elements.refusal(call.dout._replace(dtype=torch.float16))  # one kernel reads every dtype

    def default(self, call: SinksBackwardCall) -> Config:
        return Config(call.heads > 1 and call.batch * call.tokens * call.heads * call.value_dim >= _LEAST)

    def configs(self, call: SinksBackwardCall) -> list[Config]:
        return [Config(parallel=False), Config(parallel=True)]

    def workspace(self, call: SinksBackwardCall, config: Config) -> dict[str, TensorSpec]:
        """Memory for each thread: a row of dout and one of the result as fp32."""
        shape = threads(config.parallel), 2 * call.value_dim
        return {"memory": TensorSpec.contiguous(shape, torch.float32, call.dout.device)}

    def launches(self, call: SinksBackwardCall, config: Config) -> list[Launch]:
        tensors = call.dout, call.dlse, call.result, call.lse, call.sinks, call.dsinks
        size = call.dout.dtype.itemsize
        strides = [step * size for x in (call.dout, call.result) for step in call.strides(x)]
        args = {
            "memory": call.memory, "pitch": call.memory.shape[1], "heads": call.heads,
            "tensors": tuple(0 if x is None else x for x in tensors),
            "strides": (*strides, *(step * 4 for step in call.lse_strides)),
            "sizes": (call.batch, call.tokens, call.value_dim, DTYPE_CODES[call.dout.dtype]),
        }  # fmt: skip
        return [Launch(_sinks, 1, args, options={"parallel": config.parallel})]


attention_sinks_backward = SinksBackward()
