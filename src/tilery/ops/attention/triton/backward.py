"""attention_backward in Triton: tiles, and the launches of backward_kernel.py.

Three launches: delta, what the gradients of scores are shifted by; dk and dv by blocks of keys; dq by blocks of
queries.
"""

from dataclasses import dataclass
from typing import Any

import torch

from tilery.base.integers import ceil_div, next_power_of_2
from tilery.base.launch import Launch
from tilery.base.spec import TensorSpec, Work
from tilery.core.kernel import Kernel
from tilery.hardware.gpu import ARCHS, gpu
from tilery.ops.attention.call import BackwardCall
from tilery.ops.attention.triton.backward_kernel import (
    RowSums,
    Scoring,
    Sizes,
    Strided,
    backward_delta,
    backward_dkdv,
    backward_dq,
    clear_unused,
)
from tilery.ops.attention.triton.tiles import CuSeqlens, far, shared_refusal

_ROWS = 32  # tokens of a program that only reads
_MAX_SEQUENCES = 65535  # along a grid's third axis


@dataclass(frozen=True)
class Config:
    rows: int  # keys that a program keeps, or queries
    step: int  # queries at a time, in the pass for dk and dv: it has two sums to keep
    key_step: int
    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


class AttentionBackward(Kernel):
    archs = ARCHS
    Config = Config

    def refusal(self, call: BackwardCall, config: Config | None = None) -> str | None:
        if call.batch > _MAX_SEQUENCES:
            return f"takes up to {_MAX_SEQUENCES} sequences, got {call.batch}"
        if config is None:
            return None
        width = (_block(call.head_dim) + _block(call.value_dim)) * call.q.dtype.itemsize
        need = (config.rows + config.num_stages * max(config.step, config.key_step)) * width
        return shared_refusal(call.q, config, need)

    def default(self, call: BackwardCall) -> Config:
        size, short = _block(call.head_dim), gpu(call.q.device).shared_per_block < 128 * 1024
        if call.q.dtype == torch.float32:
            return Config(32, 16, 16, num_warps=8 if size > 64 else 4, num_stages=1)
        if short:
            return Config(32, 32, 32, 4, 1) if size > 128 else Config(64, 32, 32, 4, 2)
        if size > 128 or not _even(call):
            return Config(64, 32, 32, num_warps=8, num_stages=2)
        return Config(128, 32 if size > 64 else 64, 64, num_warps=8, num_stages=2)  # 64 queries of 128 would spill

    def configs(self, call: BackwardCall) -> list[Config]:
        sizes = (
            (32, 16, 16, 4), (32, 32, 32, 4), (64, 32, 32, 4), (64, 64, 64, 4), (64, 32, 64, 8), (128, 32, 64, 8),
            (128, 64, 64, 8), (128, 64, 128, 8),
        )  # fmt: skip
        found = [Config(*size, stages) for size in sizes for stages in (1, 2, 3)]
        if call.q.dtype == torch.float32:
            found = [c for c in found if c.rows * c.step <= 32 * 32]
        return [c for c in found if self.refusal(call, c) is None]

    def estimate(self, call: BackwardCall, config: Config) -> Work:
        """The work of the pass for dk and dv, which has four of the five products."""
        seen = call.queries * call.heads // max(call.kv_heads, 1) // (2 if call.causal else 1)
        width = call.head_dim + call.value_dim
        blocks = call.batch * call.kv_heads * ceil_div(call.keys, config.rows)
        moved = (2 * config.rows + seen) * width * call.q.dtype.itemsize
        return Work(blocks, 4 * config.rows * seen * width, moved)

    def workspace(self, call: BackwardCall, config: Config) -> dict[str, TensorSpec]:
        return {"delta": TensorSpec.contiguous(call.lse.shape, torch.float32, call.lse.device)}

    def launches(self, call: BackwardCall, config: Config) -> list[Launch]:
        q, k, v, dout, result, dq, dk, dv = (
            Strided(x, *call.strides(x))
            for x in (call.q, call.k, call.v, call.dout, call.result, call.dq, call.dk, call.dv)
        )
        rows, e = call.lse_strides, _block(call.value_dim)
        args = {"dout": dout, "out": result, "dlse_ptr": call.dlse, "delta": Strided(call.delta, *rows)}
        grid = ceil_div(call.tokens, _ROWS), call.heads, 1 if call.packed else call.batch
        constants = {"VALUE_DIM": call.value_dim, "BLOCK": e, "ROWS": _ROWS}
        found = [Launch(backward_delta, grid, args | {"tokens": call.tokens}, constants, {"num_warps": 4})]
        args = {
            "q": q, "k": k, "v": v, "dout": dout, "sums": RowSums(call.lse, call.delta, rows.sequence, rows.head),
            "cu_seqlens": CuSeqlens(call.cu_seqlens_q, call.cu_seqlens_k),
            "sizes": Sizes(call.queries, call.keys, call.tokens, call.key_tokens),
            "scoring": Scoring(call.softmax_scale, call.effective_window or None, float(call.softcap) or None),
        }  # fmt: skip
        constants = {
            "GROUP": call.group, "HEAD_DIM": call.head_dim, "VALUE_DIM": call.value_dim, "D": _block(call.head_dim),
            "E": e, "ROWS": config.rows, "CAUSAL": call.causal, "FAR": far(q.token, k.token, v.token, dout.token),
        }  # fmt: skip
        grid = ceil_div(call.keys, config.rows), call.kv_heads, call.batch
        of_keys = args | {"dk": dk, "dv": dv}
        found.append(Launch(backward_dkdv, grid, of_keys, constants | {"STEP": config.step}, config.options))
        grid = ceil_div(call.queries, config.rows), call.heads, call.batch
        of_queries = args | {"dq": dq}
        found.append(Launch(backward_dq, grid, of_queries, constants | {"STEP": config.key_step}, config.options))
        if call.packed:
            outputs = (call.dq, call.cu_seqlens_q), (call.dk, call.cu_seqlens_k), (call.dv, call.cu_seqlens_k)
            found += [_clearing(x, ends, call.batch) for x, ends in outputs]
        return [launch for launch in found if all(launch.grid)]  # type: ignore[arg-type]


def _block(size: int) -> int:
    return max(next_power_of_2(size), 16)


def _even(call: BackwardCall) -> bool:
    """Whether rows start on 16 bytes; where not, values pass through registers on their way."""
    tensors = call.q, call.k, call.v, call.dout
    steps = [step for x in tensors for step in call.strides(x)]
    return all(x.aligned for x in tensors) and all(step * call.q.dtype.itemsize % 16 == 0 for step in steps)


def _clearing(x: Any, cu_seqlens: Any, sequences: int) -> Launch:
    tokens, heads, size = x.shape
    args = {"ptr": x, "cu_ptr": cu_seqlens, "sequences": sequences, "tokens": tokens, "width": heads * size}
    return Launch(clear_unused, (ceil_div(tokens, _ROWS),), args, {"ROWS": _ROWS, "BLOCK": 128}, {"num_warps": 4})


attention_backward = AttentionBackward()
