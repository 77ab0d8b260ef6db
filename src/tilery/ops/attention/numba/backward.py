"""attention_backward on the CPU: how rows are dealt out, and the launch of backward_kernel.py."""

from dataclasses import dataclass

import torch

from tilery.base.integers import ceil_div
from tilery.base.launch import Launch
from tilery.base.spec import TensorSpec
from tilery.core.kernel import Kernel
from tilery.languages import numba_elements
from tilery.languages.numba_elements import ROWS
from tilery.languages.numba_glue import threads
from tilery.ops.attention.call import BackwardCall
from tilery.ops.attention.numba.backward_arguments import Sizes, Strides, Tensors, buffer_floats
from tilery.ops.attention.numba.backward_kernel import backward_kernel
from tilery.ops.attention.numba.products import DTYPE_CODES

_PARALLEL = 2**18  # multiplications from which on the other cores are woken


@dataclass(frozen=True)
class Config:
    rows: int  # of a block
    parallel: bool


class AttentionBackward(Kernel):
    archs = ("cpu",)
    Config = Config

    def refusal(self, call: BackwardCall, config: Config | None = None) -> str | None:
        if config is not None and (config.rows < 1 or config.rows % ROWS):
            return f"rows must be a multiple of the register tile's {ROWS}, got {config.rows}"
        return numba_elements.refusal(call.q._replace(dtype=torch.float16))  # one kernel reads every dtype

    def default(self, call: BackwardCall) -> Config:
        work = call.batch * call.heads * call.queries * call.keys * (call.head_dim + call.value_dim)
        return Config(self._rounded(call, 8 * ROWS), work >= _PARALLEL)

    def configs(self, call: BackwardCall) -> list[Config]:
        sizes = dict.fromkeys(self._rounded(call, most) for most in (4 * ROWS, 8 * ROWS, 16 * ROWS))
        return [Config(rows, parallel) for rows in sizes for parallel in (False, True)]

    def _rounded(self, call: BackwardCall, most: int) -> int:
        return ceil_div(min(max(call.queries * call.heads // call.kv_heads, call.keys, 1), most), ROWS) * ROWS

    def workspace(self, call: BackwardCall, config: Config) -> dict[str, TensorSpec]:
        """Memory for each thread's buffers."""
        shape = threads(config.parallel), ceil_div(buffer_floats(config.rows, call.head_dim, call.value_dim), 16) * 16
        return {"memory": TensorSpec.contiguous(shape, torch.float32, call.q.device)}

    def launches(self, call: BackwardCall, config: Config) -> list[Launch]:
        tensors = Tensors(
            q=call.q, k=call.k, v=call.v, out=call.result, dout=call.dout, lse=call.lse, dlse=call.dlse,
            dq=call.dq, dk=call.dk, dv=call.dv, cu_q=call.cu_seqlens_q, cu_k=call.cu_seqlens_k,
        )  # fmt: skip
        q, k, v, out, dout, dq, dk, dv = (
            tuple(step * call.q.dtype.itemsize for step in call.strides(x))
            for x in (call.q, call.k, call.v, call.result, call.dout, call.dq, call.dk, call.dv)
        )
        lse = tuple(step * 4 for step in call.lse_strides)
        strides = Strides(q=q, k=k, v=v, out=out, dout=dout, lse=lse, dq=dq, dk=dk, dv=dv)
        sizes = Sizes(
            batch=call.batch, kv_heads=call.kv_heads, group=call.group, queries=call.queries, keys=call.keys,
            head=call.head_dim, value=call.value_dim, packed=call.tokens if call.packed else 0,
            packed_keys=call.key_tokens if call.packed else 0, causal=int(call.causal),
            window=call.effective_window, dtype=DTYPE_CODES[call.q.dtype],
        )  # fmt: skip
        args = {
            "memory": call.memory, "pitch": call.memory.shape[1], "rows": config.rows,
            "tensors": tuple(0 if x is None else x for x in tensors),
            "strides": tuple(step for steps in strides for step in steps), "sizes": tuple(sizes),
            "scale": call.softmax_scale, "softcap": float(call.softcap),
        }  # fmt: skip
        return [Launch(backward_kernel, 1, args, options={"parallel": config.parallel})]


attention_backward = AttentionBackward()
