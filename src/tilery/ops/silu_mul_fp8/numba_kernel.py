"""Rows in parallel over the cores; a row waits in fp32 for its scales."""

from tilery.base.spec import Artifact
from tilery.languages import numba_glue
from tilery.ops.silu_mul_fp8 import outputs
from tilery.parts import numba_quantise, numba_rows
from tilery.parts.numba_rows import Config, archs

__all__ = ["Config", "archs", "compile", "configs", "default", "refusal", "run"]


def refusal(gate, up, per: str, layout: str, pow2: bool, format: str, config: Config | None = None) -> str | None:
    return numba_rows.refusal(gate)


def default(gate, up, per: str, layout: str, pow2: bool, format: str) -> Config:
    return numba_rows.default(gate, least=2**16)


def configs(gate, up, per: str, layout: str, pow2: bool, format: str) -> list[Config]:
    return numba_rows.configs()


def _call(outs, gate, up, per, layout, pow2, format):
    return numba_quantise.call(outs, gate, up, True, per, pow2, format)


def compile(specs, config: Config, arch: str) -> Artifact:
    return numba_glue.legacy_compile(*_call(outputs(*specs), *specs))


def run(outs, args, config: Config) -> None:
    kernel, *arguments = _call(outs, *args)
    numba_glue.legacy_launch(kernel, config.parallel, *arguments)
