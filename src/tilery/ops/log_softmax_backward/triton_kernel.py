"""One program per row: both rows sit in its registers if they can, so each is read once."""

from tilery.base.spec import Artifact
from tilery.ops.log_softmax_backward import outputs
from tilery.parts import triton_softmax_backward
from tilery.parts.triton_softmax_backward import Config, archs, configs, default, refusal  # noqa: F401


def compile(specs, config: Config, arch: str) -> Artifact:
    return triton_softmax_backward.compile(outputs(*specs), *specs, config, arch, log=True)


def run(outs, args, config: Config) -> None:
    triton_softmax_backward.run(outs, *args, config, log=True)
