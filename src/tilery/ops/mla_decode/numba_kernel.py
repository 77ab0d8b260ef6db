"""A core takes the heads, which share all keys, and a chunk of these; what chunks found is joined in their order."""

from typing import Any

from tilery.ops.mla_decode import outputs, sizes
from tilery.parts.numba_attention import Config, archs, kernel
from tilery.parts.numba_attention_pieces import KINDS
from tilery.parts.numba_attention_tasks import Kinds, Rules, Sizes, Strides, Task, Tensors, steps

__all__ = ["Config", "archs", "compile", "configs", "default", "refusal", "run", "workspace"]


def _task(outs: Any, specs: Any, scale: float = 1.0) -> Task:
    """Of all arguments but the scale. A key's first values are the value."""
    (out, lse), (q, q_rope, cache, lengths, table) = outs, specs
    s, kind = sizes(q, q_rope, cache, table), KINDS[q.dtype]
    by_key = steps(cache, 0, 1, None)
    strides = Strides(
        steps(q, 0, 1, 2), by_key, by_key, steps(out, 0, 1, 2), steps(lse, 0, 2, 1), steps(q_rope, 0, 1, 2),
        table=0 if table is None else table.stride(0) * 4,
    )  # fmt: skip
    shape = Sizes(
        s.batch, 1, s.heads, s.queries, s.bound, s.latent, s.latent + s.rope, s.latent,
        q_rest=s.rope, page=s.block, pages=cache.shape[0],
    )  # fmt: skip
    tensors = Tensors(q, cache, cache, out, lse, q_rest=q_rope, lengths=lengths, table=table)
    return Task(tensors, strides, shape, Rules(scale, causal=1), Kinds(kind, kind, kind))


refusal, default, configs, workspace, compile, run = kernel(
    _task, lambda outs, args: _task(outs, args[:-1], float(args[-1])), outputs, cached=True
)
