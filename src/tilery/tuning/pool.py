"""Who measures and who compiles for the tuner: on this machine, or whatever stands in its place."""

from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any, Protocol

from tilery.base.errors import CompileFailed
from tilery.hardware import device
from tilery.measure.compile import Compiler
from tilery.tuning.data import Built
from tilery.tuning.worker import Measurer, Worker

_MOST_COMPILERS = 16
SILENCE_S = 60.0  # a turn lasts milliseconds, and what compiles slowly was compiled before


class Pool(Protocol):
    """A problem stays with one worker, so that the number of workers does not decide who wins."""

    compilers: int  # how many `compile` may be called at once

    @property
    def workers(self) -> Sequence[Measurer]: ...

    def compile(self, op: str, kernel: str, specs: tuple[Any, ...], arch: str, config: Any) -> Built: ...

    def close(self) -> None:
        """Ends what is under way. May be called twice."""


class LocalPool:
    """A worker for every device, and compiling children as there are cores."""

    def __init__(self, devices: Sequence[str], silence_s: float = SILENCE_S) -> None:
        self.workers: list[Measurer] = [Worker(name, silence_s) for name in devices]
        self.compilers = max(1, min(_MOST_COMPILERS, device.cores()))
        self._all = [Compiler() for _ in range(self.compilers)]
        self._free: SimpleQueue[Compiler] = SimpleQueue()
        for compiler in self._all:
            self._free.put(compiler)

    def compile(self, op: str, kernel: str, specs: tuple[Any, ...], arch: str, config: Any) -> Built:
        compiler = self._free.get()
        try:
            made = compiler.compile(op, kernel, specs, arch, config)
        except CompileFailed as error:
            return Built(failure=str(error))
        finally:
            self._free.put(compiler)
        return Built(made.registers, made.spills, made.shared)

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        for compiler in self._all:
            compiler.close()
