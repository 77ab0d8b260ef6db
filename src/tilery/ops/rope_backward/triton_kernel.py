"""rope's kernel with the inverse angle."""

from tilery.base.spec import Artifact, TensorSpec
from tilery.ops.rope_backward import outputs
from tilery.parts import triton_rope
from tilery.parts.triton_rope import Config, launch

archs = triton_rope.archs


def refusal(dq: TensorSpec, dk: TensorSpec, *how, config: Config | None = None) -> str | None:
    return triton_rope.refusal(dq, config)


def default(dq: TensorSpec, dk: TensorSpec, cos, sin, positions, layout: str, interleaved: bool) -> Config:
    return triton_rope.default(dq, dk, layout)


def configs(dq: TensorSpec, dk: TensorSpec, cos, sin, positions, layout: str, interleaved: bool) -> list[Config]:
    return triton_rope.configs(dq, dk, layout)


def compile(specs, config: Config, arch: str) -> Artifact:
    return launch(config, outputs(*specs), specs, inverse=True).compile(arch)


def run(outs, args, config: Config) -> None:
    launch(config, outs, args, inverse=True).run()
