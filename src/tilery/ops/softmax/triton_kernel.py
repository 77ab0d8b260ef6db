"""One program per row, which sits in its registers if it can; few long rows are shared out among programs."""

from tilery.base.spec import Artifact
from tilery.ops.softmax import outputs
from tilery.parts import triton_softmax
from tilery.parts.triton_softmax import Config, archs, configs, default, refusal, workspace  # noqa: F401


def compile(specs, config: Config, arch: str) -> Artifact:
    return triton_softmax.compile(outputs(*specs), *specs, config, arch, log=False)


def run(outs, args, config: Config, *sums) -> None:
    triton_softmax.run(outs, *args, config, False, *sums)
