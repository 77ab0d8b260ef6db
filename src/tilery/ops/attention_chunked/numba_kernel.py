"""A core takes a block of queries and walks over the pages of the keys they see."""

from typing import Any

from tilery.ops.attention_chunked import outputs, queries
from tilery.parts.numba_attention import Config, archs, kernel
from tilery.parts.numba_attention_tasks import Task, of_cache

__all__ = ["Config", "archs", "compile", "configs", "default", "refusal", "run", "workspace"]


def _task(outs: Any, specs: Any, scale: float | None = None) -> Task:
    """Of all arguments but the scale."""
    q, k, v, cu_q, lengths, table, k_scale, v_scale, sinks, window, softcap, most = specs
    rest = lengths, table, k_scale, v_scale, sinks, scale, window, softcap
    return of_cache(q, k, v, outs[0], *rest, cu_q, queries(q, most))


def _of_run(outs: Any, args: Any) -> Task:
    return _task(outs, (*args[:9], *args[10:]), args[9])


refusal, default, configs, workspace, compile, run = kernel(_task, _of_run, outputs)
