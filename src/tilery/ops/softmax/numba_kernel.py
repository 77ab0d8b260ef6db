"""Rows in parallel over the cores; a row's exponentials wait in fp32 for their sum, so that each is computed once."""

from tilery.base.spec import Artifact
from tilery.ops.softmax import outputs
from tilery.parts import numba_softmax
from tilery.parts.numba_softmax import Config, archs, configs, default, refusal  # noqa: F401


def compile(specs, config: Config, arch: str) -> Artifact:
    return numba_softmax.compile(outputs(*specs), specs, log=False)


def run(outs, args, config: Config) -> None:
    numba_softmax.run(outs, args, config, log=False)
