"""Rows in parallel over the cores; each is read twice, the second time from the L1 cache."""

from tilery.base.spec import Artifact
from tilery.ops.softmax_backward import outputs
from tilery.parts import numba_softmax
from tilery.parts.numba_softmax import Config, archs, configs, refusal  # noqa: F401
from tilery.parts.numba_softmax import default_backward as default  # noqa: F401


def compile(specs, config: Config, arch: str) -> Artifact:
    return numba_softmax.compile_backward(outputs(*specs), specs, log=False)


def run(outs, args, config: Config) -> None:
    numba_softmax.run_backward(outs, args, config, log=False)
