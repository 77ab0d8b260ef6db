"""Attention whose heads lie in two tensors, the second part of the keys being one for all heads."""

from typing import Any

from tilery.ops.mla import outputs, problem, problem_of_run
from tilery.parts.attention import Problem
from tilery.parts.heads import heads
from tilery.parts.numba_attention import Config, archs, kernel
from tilery.parts.numba_attention_tasks import Task, of_attention

__all__ = ["Config", "archs", "compile", "configs", "default", "refusal", "run", "workspace"]


def _joined(p: Problem, q_rope: Any, k_rope: Any, layout: str) -> Task:
    task, size = of_attention(p), p.q.dtype.itemsize
    by_query, by_key = (tuple(step * size for step in heads(x, layout).strides) for x in (q_rope, k_rope))
    return task._replace(
        tensors=task.tensors._replace(q_rest=q_rope, k_rest=k_rope),
        strides=task.strides._replace(q_rest=by_query, k_rest=(*by_key[:2], 0)),
        sizes=task.sizes._replace(q_rest=q_rope.shape[-1], k_rest=k_rope.shape[-1]),
    )


refusal, default, configs, workspace, compile, run = kernel(
    lambda outs, specs: _joined(problem(outs, specs), specs[1], specs[3], specs[-3]),
    lambda outs, args: _joined(problem_of_run(outs, args), args[1], args[3], args[-3]),
    outputs,
)
