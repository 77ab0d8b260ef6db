"""Kernels that tests change or add: what they launch instead, besides, or by torch; what they refuse."""

import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

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


TILES = "numba.tiles"  # the name under which Tiles is added


@dataclass(frozen=True)
class Tile:
    """A config to be tuned."""

    tile: int
    kind: str = "plain"

    old_names: ClassVar = {"block": "tile"}
    old_values: ClassVar = {"kind": {"simple": "plain"}}


class Tiles(ByTorch):
    """softmax by torch, as if its tile mattered: one of 8 if nobody has tuned it, and none above."""

    Config, largest = Tile, 8

    def __init__(self) -> None:
        super().__init__(lambda x, y: y.copy_(x.softmax(-1)), "x", "y")

    def refusal(self, call, config=None):
        large = config is not None and config.tile > self.largest
        return f"tile of {config.tile} is more than {self.largest}" if large else None

    def default(self, call):
        return Tile(8)

    def configs(self, call):
        return [Tile(tile, kind) for kind in ("plain", "other") for tile in range(1, self.largest + 1)]


def place_of(monkeypatch, name: str, kernel: Kernel) -> str:
    """Where a contract finds a kernel that a test has made: a module of this process alone."""
    module = f"planted.{name}"
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(kernel=kernel))
    return f"{module}:kernel"


def add(monkeypatch, op: Op, name: str, kernel: Kernel, first: bool = False) -> None:
    """The op has one kernel more, after the others or before them; or another one of that name."""
    others = {other: where for other, where in op.kernels.items() if other != name}
    mine = {name: place_of(monkeypatch, f"{op.name}.{name}", kernel)}
    monkeypatch.setattr(op, "kernels", mine | others if first else others | mine)
    op.plans.clear()
