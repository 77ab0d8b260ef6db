"""A program norms and turns a few heads of one token, all of them in registers; q and k in one launch."""

from tilery.base.spec import Artifact, TensorSpec
from tilery.parts import triton_rope
from tilery.parts.triton_rope import Config, Norm, launch

archs = triton_rope.archs


def refusal(q: TensorSpec, *how, config: Config | None = None) -> str | None:
    return triton_rope.refusal(q, config)


def default(q: TensorSpec, k: TensorSpec, *how) -> Config:
    return triton_rope.default(q, k, how[-2])


def configs(q: TensorSpec, k: TensorSpec, *how) -> list[Config]:
    return triton_rope.configs(q, k, how[-2])


def _launch(config: Config, q, k, q_weight, k_weight, cos, sin, positions, eps, offset, layout, interleaved):
    args = q, k, cos, sin, positions, layout, interleaved
    return launch(config, None, args, norm=Norm(q_weight, k_weight, eps, offset))


def compile(specs, config: Config, arch: str) -> Artifact:
    *tensors, layout, interleaved = specs
    return _launch(config, *tensors, 1e-6, 0.0, layout, interleaved).compile(arch)


def run(outs, args, config: Config) -> None:
    _launch(config, *args).run()
