"""Split KV: a block takes a part of a sequence's keys for all queries and heads that share them; then it is combined.

Nothing here looks at the batch: a sequence must be cut alike in any.
"""

import torch

from tilery.base.spec import Artifact, TensorSpec, Work
from tilery.ops.attention_decode import outputs
from tilery.parts import cutile_paged_attention as attention
from tilery.parts.cutile_paged_attention import Config, Problem, archs

__all__ = ["Config", "archs", "compile", "configs", "default", "estimate", "refusal", "run", "workspace"]

_PROGRAMS = 128  # of one sequence: about one for each processor of an H200


def _problem(outs, q, k_cache, v_cache, lengths, table, scale: float | None = None) -> Problem:
    size = q.shape[3] ** -0.5 if scale is None else float(scale)
    return Problem(q, None, k_cache, None, v_cache, lengths, table, outs[0], None, size)


def _planned(specs) -> Problem:
    return _problem(outputs(*specs), *specs[:5])


def refusal(*specs, config: Config | None = None) -> str | None:
    k_scale, _, sinks, window, softcap = specs[5:]
    asked = {"fp8": k_scale is not None, "sinks": sinks is not None, "window": window > 0, "softcap": softcap > 0}
    if extra := [name for name, there in asked.items() if there]:
        return f"takes plain attention alone, got {', '.join(extra)}"
    return attention.refusal(_planned(specs), config or default(*specs), "D")


def default(*specs) -> Config:
    """Few rows by mma.sync, many by wgmma, which takes 64 of them; fp32 without tensor cores."""
    return _candidates(_planned(specs))[0]


def configs(*specs) -> list[Config]:
    return [c for c in _candidates(_planned(specs)) if refusal(*specs, config=c) is None]


def _candidates(p: Problem) -> list[Config]:
    """Those that spill registers, compiled for sm_90, are left out."""
    rows, size = p.q.shape[1] * p.group, p.q.shape[3]
    splits = max(_PROGRAMS // attention.power(p.k.shape[2]), 1)
    if p.q.dtype == torch.float32:
        return [Config(16, 16, splits, num_worker_warps=8)]
    narrow = Config(64, 32, splits, num_worker_warps=8)
    if size > 128:
        return [narrow]
    few, many = [Config(16, 64, splits), Config(16, 32, splits)], [Config(64, 64, splits), narrow]
    if not all(x.aligned and not any(step * x.dtype.itemsize % 16 for step in x.strides[:3]) for x in (p.k, p.v)):
        few, many = few[1:], many[1:]  # without TMA 64 keys pass through registers: spilled, compiled in 90 s
    return few + many if rows <= 16 else many


def estimate(*specs, config: Config) -> Work:
    return attention.estimate(_planned(specs), config)


def workspace(*specs, config: Config) -> tuple[TensorSpec, ...]:
    return attention.workspace(_planned(specs), config)


def compile(specs, config: Config, arch: str) -> Artifact:
    return attention.compile(_planned(specs), config, arch)


def run(outs, args, config: Config, *kept) -> None:
    attention.run(_problem(outs, *args[:5], args[8]), config, *kept)
