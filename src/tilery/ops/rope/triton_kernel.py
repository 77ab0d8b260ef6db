"""A program turns a few heads of one token; q and k in one launch."""

from tilery.base.spec import Artifact, TensorSpec
from tilery.ops.rope import outputs
from tilery.parts import triton_rope
from tilery.parts.triton_rope import Config, launch

archs = triton_rope.archs


def refusal(q: TensorSpec, k: TensorSpec, *how, config: Config | None = None) -> str | None:
    return triton_rope.refusal(q, config)


def default(q: TensorSpec, k: TensorSpec, cos, sin, positions, layout: str, interleaved: bool) -> Config:
    return triton_rope.default(q, k, layout)


def configs(q: TensorSpec, k: TensorSpec, cos, sin, positions, layout: str, interleaved: bool) -> list[Config]:
    return triton_rope.configs(q, k, layout)


def compile(specs, config: Config, arch: str) -> Artifact:
    return launch(config, outputs(*specs), specs).compile(arch)


def run(outs, args, config: Config) -> None:
    launch(config, outs, args).run()
