"""Rows in parallel over the cores; each is read three times, from the caches after the first."""

from tilery.base.spec import Artifact
from tilery.ops.log_softmax import outputs
from tilery.parts import numba_softmax
from tilery.parts.numba_softmax import Config, archs, configs, default, refusal  # noqa: F401


def compile(specs, config: Config, arch: str) -> Artifact:
    return numba_softmax.compile(outputs(*specs), specs, log=True)


def run(outs, args, config: Config) -> None:
    numba_softmax.run(outs, args, config, log=True)
