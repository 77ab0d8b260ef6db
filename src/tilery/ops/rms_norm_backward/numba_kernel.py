"""Each core takes a share of the rows and sums the weight's gradient in a row of its own; these are added in order."""

from tilery.base.spec import Artifact, TensorSpec
from tilery.languages import numba_glue
from tilery.ops.rms_norm_backward import outputs
from tilery.parts import numba_rows
from tilery.parts.numba_norms import partial_sums, rms_norm_backward
from tilery.parts.numba_rows import Config
from tilery.parts.rows import heads, rows

archs = numba_rows.archs


def refusal(dy: TensorSpec, x: TensorSpec, weight: TensorSpec, config: Config | None = None) -> str | None:
    return numba_rows.refusal(x)


def default(dy: TensorSpec, x: TensorSpec, weight: TensorSpec) -> Config:
    return numba_rows.default(x, least=2**16)


def configs(dy: TensorSpec, x: TensorSpec, weight: TensorSpec) -> list[Config]:
    return numba_rows.configs()


def workspace(dy: TensorSpec, x: TensorSpec, weight: TensorSpec, config: Config) -> tuple[TensorSpec, ...]:
    return (partial_sums(x, config),)


def _arguments(outs, sums, dy, x, weight, eps=1e-6, offset=0.0):
    """The launch arguments, of tensors for `run` and of specs for `compile`."""
    m, n, stride, count, step = heads(x)
    tensors = dy, x, weight, dy, *outs, sums  # dy stands for what is not passed
    return tensors, rows(dy).stride, 0, stride, count, step, m, n, False, float(eps), float(offset)


def compile(specs, config: Config, arch: str) -> Artifact:
    return numba_glue.legacy_compile(
        rms_norm_backward, *_arguments(outputs(*specs), partial_sums(specs[1], config), *specs)
    )


def run(outs, args, config: Config, sums) -> None:
    numba_glue.legacy_launch(rms_norm_backward, config.parallel, *_arguments(outs, sums, *args))
