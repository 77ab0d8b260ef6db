"""Rows in parallel over the cores; each is read twice, the second time from the L1 cache."""

from tilery.backends import numba_glue
from tilery.ops.softmax_backward import outputs
from tilery.parts import numba_rows, numba_softmax
from tilery.parts.numba_rows import Config
from tilery.parts.rows import rows
from tilery.spec import Artifact, TensorSpec

archs = numba_rows.archs


def refusal(dy: TensorSpec, y: TensorSpec, config: Config | None = None) -> str | None:
    return numba_rows.refusal(dy)


def default(dy: TensorSpec, y: TensorSpec) -> Config:
    return numba_rows.default(dy, least=2**17)


def configs(dy: TensorSpec, y: TensorSpec) -> list[Config]:
    return numba_rows.configs()


def _arguments(outs, dy, y):
    """The launch arguments, of tensors for `run` and of specs for `compile`."""
    m, n, stride = rows(dy)
    return (dy, y, outs[0]), stride, rows(y).stride, m, n, False


def compile(specs, config: Config, arch: str) -> Artifact:
    return numba_glue.compile(numba_softmax.softmax_backward, *_arguments(outputs(*specs), *specs))


def run(outs, args, config: Config) -> None:
    numba_glue.launch(numba_softmax.softmax_backward, config.parallel, *_arguments(outs, *args))
