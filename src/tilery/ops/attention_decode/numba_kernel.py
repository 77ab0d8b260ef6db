"""A core takes the heads that share a key and a chunk of the keys; what chunks found is joined in their order."""

from typing import Any

from tilery.ops.attention_decode import outputs
from tilery.parts.numba_attention import Config, archs, kernel
from tilery.parts.numba_attention_tasks import Task, of_cache

__all__ = ["Config", "archs", "compile", "configs", "default", "refusal", "run", "workspace"]


def _task(outs: Any, specs: Any, scale: float | None = None) -> Task:
    """Of all arguments but the scale."""
    q, k, v, lengths, table, k_scale, v_scale, sinks, window, softcap = specs
    return of_cache(q, k, v, outs[0], lengths, table, k_scale, v_scale, sinks, scale, window, softcap)


def _of_run(outs: Any, args: Any) -> Task:
    return _task(outs, (*args[:8], *args[9:]), args[8])


refusal, default, configs, workspace, compile, run = kernel(_task, _of_run, outputs, cached=True)
