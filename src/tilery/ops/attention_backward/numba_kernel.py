"""Blocks of queries and blocks of keys over the cores; each walks over the other side."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilery.base.spec import Artifact, TensorSpec
from tilery.languages import numba_elements, numba_glue
from tilery.languages.numba_elements import ROWS
from tilery.ops.attention_backward import Problem, outputs, problem, problem_of_run
from tilery.parts.numba_attention_backward import gradients
from tilery.parts.numba_attention_pieces import KINDS
from tilery.parts.numba_attention_sides import Sizes, Tensors, floats

archs = ("cpu",)


@dataclass(frozen=True)
class Config:
    rows: int  # of a block
    parallel: bool


def refusal(*specs, config: Config | None = None) -> str | None:
    if config is not None and (config.rows < 1 or config.rows % ROWS):
        return f"rows must be a multiple of the register tile's {ROWS}, got {config.rows}"
    return numba_elements.refusal(specs[2]._replace(dtype=torch.float16))  # one kernel reads every dtype


def default(*specs) -> Config:
    return Config(_rounded(specs, 8 * ROWS), _work(specs) >= 2**18)


def configs(*specs) -> list[Config]:
    sizes = dict.fromkeys(_rounded(specs, rows) for rows in (4 * ROWS, 8 * ROWS, 16 * ROWS))
    return [Config(rows, parallel) for rows in sizes for parallel in (False, True)]


def _rounded(specs, most: int) -> int:
    p = problem(outputs(*specs), specs)
    return -(-min(max(p.queries * p.heads // p.kv_heads, p.keys, 1), most) // ROWS) * ROWS


def _work(specs) -> int:
    p = problem(outputs(*specs), specs)
    return p.batch * p.heads * p.queries * p.keys * (p.size + p.value)


def workspace(*specs, config: Config) -> tuple[TensorSpec, ...]:
    """Buffers for each thread."""
    q, v = specs[2], specs[4]
    size = -(-floats(config.rows, q.shape[-1], v.shape[-1]) // 16) * 16
    return (TensorSpec.contiguous((numba_glue.threads(config.parallel), size), torch.float32, q.device),)


def _arguments(p: Problem, config: Config, work: Any) -> tuple[Any, ...]:
    """The launch arguments, of tensors for `run` and of specs for `compile`."""
    tensors = Tensors(p.q, p.k, p.v, p.out, p.dout, p.lse, p.dlse, p.dq, p.dk, p.dv, p.cu_q, p.cu_k)
    addresses = Tensors(*(t.data_ptr() if isinstance(t, Tensor) else 0 for t in tensors))
    size, packed = p.q.dtype.itemsize, p.cu_q is not None
    inputs, results = p.strides("q", "k", "v", "out", "dout"), p.strides("dq", "dk", "dv")
    strides = *(s * size for s in inputs), *(s * 4 for s in p.lse_strides), *(s * size for s in results)
    sizes = Sizes(
        p.batch, p.kv_heads, p.heads // p.kv_heads, p.queries, p.keys, p.size, p.value,
        p.tokens if packed else 0, p.key_tokens if packed else 0, int(p.causal), KINDS[p.q.dtype],
    )  # fmt: skip
    return (work,), work.shape[1], config.rows, addresses, strides, sizes, p.scale


def compile(specs, config: Config, arch: str) -> Artifact:
    arguments = _arguments(problem(outputs(*specs), specs), config, *workspace(*specs, config=config))
    return numba_glue.legacy_compile(gradients, *arguments)


def run(outs, args, config: Config, work) -> None:
    numba_glue.legacy_launch(gradients, config.parallel, *_arguments(problem_of_run(outs, args), config, work))
