"""Tokens in parallel over the cores; q and k in one pass."""

from tilery.base.spec import Artifact, TensorSpec
from tilery.ops.rope import outputs
from tilery.parts import numba_rope, numba_rows
from tilery.parts.numba_rows import Config

archs = numba_rope.archs


def refusal(q: TensorSpec, *how, config: Config | None = None) -> str | None:
    return numba_rope.refusal(q)


def default(q: TensorSpec, k: TensorSpec, cos, sin, positions, layout: str, interleaved: bool) -> Config:
    return numba_rope.default(q, layout)


def configs(*specs) -> list[Config]:
    return numba_rows.configs()


def compile(specs, config: Config, arch: str) -> Artifact:
    return numba_rope.compile(outputs(*specs), specs)


def run(outs, args, config: Config) -> None:
    numba_rope.run(config, outs, args)
