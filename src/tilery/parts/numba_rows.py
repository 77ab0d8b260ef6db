"""Numba kernels that give rows to the cores: when it pays to wake them."""

from dataclasses import dataclass

from tilery.backends import numba_glue
from tilery.parts.rows import rows
from tilery.spec import TensorSpec

archs = ("cpu",)


@dataclass(frozen=True)
class Config:
    parallel: bool


def refusal(x: TensorSpec) -> str | None:
    return numba_glue.refusal(x)


def default(x: TensorSpec, least: int) -> Config:
    """In parallel from `least` elements on."""
    m, n, _ = rows(x)
    return Config(parallel=m > 1 and m * n >= least)


def configs() -> list[Config]:
    return [Config(parallel=False), Config(parallel=True)]
