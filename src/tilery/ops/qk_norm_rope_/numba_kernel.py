"""Tokens in parallel over the cores; a head is normed and turned in the L1 cache, in fp32."""

from tilery.base.spec import Artifact, TensorSpec
from tilery.parts import numba_rope, numba_rows
from tilery.parts.numba_rope import Norm
from tilery.parts.numba_rows import Config

archs = numba_rope.archs


def refusal(q: TensorSpec, *how, config: Config | None = None) -> str | None:
    return numba_rope.refusal(q)


def default(q: TensorSpec, *how) -> Config:
    return numba_rope.default(q, how[-2])


def configs(*specs) -> list[Config]:
    return numba_rows.configs()


def compile(specs, config: Config, arch: str) -> Artifact:
    q, k, q_weight, k_weight, *turn = specs
    return numba_rope.compile(None, (q, k, *turn), weights=(q_weight, k_weight), norm=Norm(True, 1e-6, 0.0))


def run(outs, args, config: Config) -> None:
    q, k, q_weight, k_weight, cos, sin, positions, eps, offset, layout, interleaved = args
    turn = q, k, cos, sin, positions, layout, interleaved
    norm = Norm(True, float(eps), float(offset))
    numba_rope.run(config, None, turn, weights=(q_weight, k_weight), norm=norm)
