"""rope's kernel with the inverse angle."""

from tilery.base.spec import Artifact, TensorSpec
from tilery.ops.rope_backward import outputs
from tilery.parts import numba_rope, numba_rows
from tilery.parts.numba_rows import Config

archs = numba_rope.archs


def refusal(dq: TensorSpec, *how, config: Config | None = None) -> str | None:
    return numba_rope.refusal(dq)


def default(dq: TensorSpec, dk: TensorSpec, cos, sin, positions, layout: str, interleaved: bool) -> Config:
    return numba_rope.default(dq, layout)


def configs(*specs) -> list[Config]:
    return numba_rows.configs()


def compile(specs, config: Config, arch: str) -> Artifact:
    return numba_rope.compile(outputs(*specs), specs, inverse=True)


def run(outs, args, config: Config) -> None:
    numba_rope.run(config, outs, args, inverse=True)
