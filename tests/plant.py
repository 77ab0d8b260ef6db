"""Kernels that tests change or add: what they launch instead, besides, or by torch; what they refuse."""

import sys
from dataclasses import dataclass
from types import SimpleNamespace

from tilery.base.launch import Host
from tilery.core.kernel import Kernel
from tilery.core.op import Op


def instead(monkeypatch, op: Op, kernel: str, function, *names: str) -> None:
    """`function` of these arguments and outputs, by name, runs instead of the kernel's launches."""
    monkeypatch.setattr(
        type(op.kernel(kernel)),
        "launches",
        lambda self, call, config: [Host(function, tuple(getattr(call, name) for name in names))],
    )


def after(monkeypatch, op: Op, kernel: str, function, *names: str) -> None:
    """`function` of these arguments and outputs, else of the first that the kernel writes, runs after its launches."""
    kind = type(op.kernel(kernel))
    right = kind.launches

    def launches(self, call, config):
        chosen = names or (op.output_names or op.mutates)[:1]
        return [*right(self, call, config), Host(function, tuple(getattr(call, name) for name in chosen))]

    monkeypatch.setattr(kind, "launches", launches)


def refusing(monkeypatch, op: Op, kernel: str, why) -> None:
    """The kernel refuses with `why`: a sentence, or a function of the config that says one or None."""
    said = why if callable(why) else lambda config: why
    monkeypatch.setattr(type(op.kernel(kernel)), "refusal", lambda self, call, config=None: said(config))


@dataclass(frozen=True)
class NoChoice:
    """The config of a kernel that has nothing to choose."""


class ByTorch(Kernel):
    """A kernel that torch computes: `function` of these arguments and outputs, by name."""

    archs, Config = ("cpu",), NoChoice

    def __init__(self, function, *names: str) -> None:
        self.function, self.names = function, names

    def default(self, call):
        return self.Config()

    def launches(self, call, config):
        return [Host(self.function, tuple(getattr(call, name) for name in self.names))]


def place_of(monkeypatch, name: str, kernel: Kernel) -> str:
    """Where a contract finds a kernel that a test has made: a module of this process alone."""
    module = f"planted.{name}"
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(kernel=kernel))
    return f"{module}:kernel"


def add(monkeypatch, op: Op, name: str, kernel: Kernel) -> None:
    """The op has one kernel more, after the others; or another one of that name."""
    monkeypatch.setitem(op.kernels, name, place_of(monkeypatch, f"{op.name}.{name}", kernel))
    op.plans.clear()
