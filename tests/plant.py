"""Kernels that tests change: what they launch instead, or besides."""

from tilery.base.launch import Host
from tilery.core.op import Op


def instead(monkeypatch, op: Op, kernel: str, function, *names: str) -> None:
    """`function` of these arguments and outputs, by name, runs instead of the kernel's launches."""
    monkeypatch.setattr(
        type(op.kernel(kernel)),
        "launches",
        lambda self, call, config: [Host(function, tuple(getattr(call, name) for name in names))],
    )


def after(monkeypatch, op: Op, kernel: str, function) -> None:
    """`function` of the first thing that the kernel writes runs after its launches."""
    kind = type(op.kernel(kernel))
    right = kind.launches

    def launches(self, call, config):
        target = getattr(call, (op.output_names or op.mutates)[0])
        return [*right(self, call, config), Host(function, (target,))]

    monkeypatch.setattr(kind, "launches", launches)
