"""Split KV: a block takes a part of a sequence's keys for some of its heads; keys are the values as well."""

from typing import Any

import torch

from tilery.base.spec import Artifact, TensorSpec, Work
from tilery.ops.mla_decode import outputs
from tilery.parts import cutile_paged_attention as attention
from tilery.parts.cutile_attention import strided
from tilery.parts.cutile_paged_attention import Config, Problem, archs

__all__ = ["Config", "archs", "compile", "configs", "default", "estimate", "refusal", "run", "workspace"]

_FLOAT = (Config(16, 16, 64, num_worker_warps=8),)
# 64 rows even where there are fewer: without wgmma keys that are values too spill registers, compiled for sm_90.
_HALF = tuple(Config(64, keys, splits, num_worker_warps=8) for splits in (32, 16, 64) for keys in (64, 32))


def _problem(outs, q, q_rope, cache, lengths, table, scale: float = 1.0) -> Problem:
    latent, rope = q.shape[3], q_rope.shape[3]
    k, k_rope = _part(cache, 0, latent), _part(cache, latent, rope)
    return Problem(q, q_rope, k, k_rope, None, lengths, table, *outs, float(scale))


def _part(cache: Any, first: int, size: int) -> Any:
    """Columns of the cache, as those of its one head; they lie on 16 bytes if the cache does."""
    (blocks, tokens, _), steps = cache.shape, (cache.stride(0), cache.stride(1), cache.stride(1), 1)
    begun = cache if isinstance(cache, TensorSpec) else cache[..., first:]
    return strided(begun, (blocks, tokens, 1, size), steps)


def _planned(specs) -> Problem:
    return _problem(outputs(*specs), *specs)


def refusal(*specs, config: Config | None = None) -> str | None:
    return attention.refusal(_planned(specs), config or default(*specs), "L")


def default(*specs) -> Config:
    return (_FLOAT if specs[0].dtype == torch.float32 else _HALF)[0]


def configs(*specs) -> list[Config]:
    found = _FLOAT if specs[0].dtype == torch.float32 else _HALF
    return [c for c in found if refusal(*specs, config=c) is None]


def estimate(*specs, config: Config) -> Work:
    return attention.estimate(_planned(specs), config)


def workspace(*specs, config: Config) -> tuple[TensorSpec, ...]:
    return attention.workspace(_planned(specs), config)


def compile(specs, config: Config, arch: str) -> Artifact:
    return attention.compile(_planned(specs), config, arch)


def run(outs, args, config: Config, *kept) -> None:
    attention.run(_problem(outs, *args), config, *kept)
