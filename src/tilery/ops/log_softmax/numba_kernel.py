"""Rows in parallel over the cores; each is read three times, from the caches after the first."""

from tilery.backends import numba_glue
from tilery.ops.log_softmax import outputs
from tilery.parts import numba_rows, numba_softmax
from tilery.parts.numba_rows import Config
from tilery.parts.rows import rows
from tilery.spec import Artifact, TensorSpec

archs = numba_rows.archs


def refusal(x: TensorSpec, config: Config | None = None) -> str | None:
    return numba_rows.refusal(x)


def default(x: TensorSpec) -> Config:
    return numba_rows.default(x, least=2**16)


def configs(x: TensorSpec) -> list[Config]:
    return numba_rows.configs()


def _arguments(outs, x):
    """The launch arguments, of tensors for `run` and of specs for `compile`."""
    m, n, stride = rows(x)
    return (x, outs[0]), stride, m, n, True


def compile(specs, config: Config, arch: str) -> Artifact:
    return numba_glue.compile(numba_softmax.softmax, *_arguments(outputs(*specs), *specs))


def run(outs, args, config: Config) -> None:
    numba_glue.launch(numba_softmax.softmax, config.parallel, *_arguments(outs, *args))
