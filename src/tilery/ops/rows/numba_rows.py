"""Numba kernels that give rows to the cores: when it pays to wake them."""

from dataclasses import dataclass

from tilery.base.rows import rows
from tilery.base.spec import TensorSpec
from tilery.core.call import Call
from tilery.core.kernel import Kernel
from tilery.languages import numba_elements


@dataclass(frozen=True)
class Config:
    parallel: bool


class NumbaRows(Kernel):
    """Rows are dealt out to all threads from `least` elements on, and stay with one below."""

    archs = ("cpu",)
    Config = Config
    least: int

    def rows_of(self, call: Call) -> TensorSpec:
        """The argument whose rows they are: the first, where a kernel says nothing else."""
        found: TensorSpec = call.tensors()[0]
        return found

    def refusal(self, call: Call, config: Config | None = None) -> str | None:
        return numba_elements.refusal(self.rows_of(call))

    def default(self, call: Call) -> Config:
        m, n, _ = rows(self.rows_of(call))
        return Config(parallel=m > 1 and m * n >= self.least)

    def configs(self, call: Call) -> list[Config]:
        return [Config(parallel=False), Config(parallel=True)]
