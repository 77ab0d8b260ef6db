"""Numba kernels that give rows to the cores: when it pays to wake them."""

from dataclasses import dataclass

from tilery.base.spec import TensorSpec
from tilery.languages import numba_elements
from tilery.parts.rows import rows

archs = ("cpu",)


@dataclass(frozen=True)
class Config:
    parallel: bool


def refusal(x: TensorSpec) -> str | None:
    return numba_elements.refusal(x)


def default(x: TensorSpec, least: int) -> Config:
    """In parallel from `least` elements on."""
    m, n, _ = rows(x)
    return Config(parallel=m > 1 and m * n >= least)


def configs() -> list[Config]:
    return [Config(parallel=False), Config(parallel=True)]
