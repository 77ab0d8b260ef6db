"""Each core takes a share of the rows and sums the weight's gradient in a row of its own; these are added in order."""

from tilery.base.spec import Artifact, TensorSpec
from tilery.languages import numba_glue
from tilery.ops.add_rms_norm_backward import outputs
from tilery.parts import numba_rows
from tilery.parts.numba_norms import partial_sums, rms_norm_backward
from tilery.parts.numba_rows import Config
from tilery.parts.rows import rows

archs = numba_rows.archs


def refusal(dy, dresidual, residual_out: TensorSpec, weight, config: Config | None = None) -> str | None:
    return numba_rows.refusal(residual_out)


def default(dy, dresidual, residual_out: TensorSpec, weight) -> Config:
    return numba_rows.default(residual_out, least=2**16)


def configs(dy, dresidual, residual_out: TensorSpec, weight) -> list[Config]:
    return numba_rows.configs()


def workspace(dy, dresidual, residual_out: TensorSpec, weight, config: Config) -> tuple[TensorSpec, ...]:
    return (partial_sums(residual_out, config),)


def _arguments(outs, sums, dy, dresidual, total, weight, eps=1e-6, offset=0.0):
    """The launch arguments, of tensors for `run` and of specs for `compile`."""
    m, n, stride = rows(total)
    passed = dresidual is not None
    r = dresidual if passed else dy  # not read
    strides = rows(dy).stride, rows(r).stride, stride, 1, 0
    return (dy, total, weight, r, *outs, sums), *strides, m, n, passed, float(eps), float(offset)


def compile(specs, config: Config, arch: str) -> Artifact:
    return numba_glue.legacy_compile(
        rms_norm_backward, *_arguments(outputs(*specs), partial_sums(specs[2], config), *specs)
    )


def run(outs, args, config: Config, sums) -> None:
    numba_glue.legacy_launch(rms_norm_backward, config.parallel, *_arguments(outs, sums, *args))
