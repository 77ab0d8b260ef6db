"""Launches as data: what a kernel asks its language to run.

A launch is described once, when a plan is made. Its arguments are numbers, known then, or references to what a call
brings: `Argument` for a tensor, `Scalar` for a number that no decision depends on. The language's glue fills those in.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tilery.base.spec import TensorSpec

Values = tuple[Any, ...]  # of one call: its arguments, outputs and workspace, in this order
_VECTOR = 16  # bytes: what a vector access needs its address to be a multiple of


class Argument(TensorSpec):
    """A tensor of a call: its spec, and where the call has it. A view of one keeps that place."""

    slot: int  # index into the call's values
    offset: int  # bytes from the tensor's first element
    is_view: bool  # whether shape, strides, dtype or offset are not the tensor's own

    @classmethod
    def at_slot(cls, spec: TensorSpec, slot: int) -> "Argument":
        made = cls(*spec)
        made.slot, made.offset, made.is_view = slot, 0, False
        return made

    def _replace(self, **changes: Any) -> "Argument":
        """A view with another shape, strides or dtype."""
        made = Argument(*super()._replace(**changes))
        made.slot, made.offset, made.is_view = self.slot, self.offset, True
        return made

    def view(self, shape: tuple[int, ...], strides: tuple[int, ...], start: int = 0) -> "Argument":
        """A view that begins `start` elements further on."""
        step = start * self.dtype.itemsize
        made = self._replace(shape=shape, strides=strides, aligned=self.aligned and step % _VECTOR == 0)
        made.offset = self.offset + step
        return made

    def at(self, start: int) -> "Argument":
        """The same shape, `start` elements further on."""
        return self.view(self.shape, self.strides, start)

    def tensor(self, values: Values) -> Tensor:
        """The tensor that a call has here."""
        found: Tensor = values[self.slot]
        if not self.is_view:
            return found
        if found.dtype != self.dtype:
            found = found.view(self.dtype)
        return found.as_strided(self.shape, self.strides, found.storage_offset() + self.offset // self.dtype.itemsize)

    def address(self, values: Values) -> int:
        found: int = values[self.slot].data_ptr()
        return found + self.offset


@dataclass(frozen=True)
class Scalar:
    """A number of a call that no decision depends on, or what `function` makes of it."""

    slot: int
    kind: type  # float, int or bool
    function: Callable[[Any], Any] | None = None

    def then(self, function: Callable[[Any], Any]) -> "Scalar":
        """What becomes of it before the kernel is given it."""
        before = self.function
        return Scalar(self.slot, self.kind, function if before is None else lambda value: function(before(value)))

    def _no_value(self, *_: Any) -> Any:
        raise TypeError(
            "a runtime scalar has no value in a plan: check it in check_runtime, change it by .then(function)"
        )

    __lt__ = __le__ = __gt__ = __ge__ = __neg__ = __bool__ = __add__ = __mul__ = __sub__ = __truediv__ = _no_value

    def value(self, values: Values) -> Any:
        given = values[self.slot]
        found = given if given is None else self.kind(given)  # an int is taken where a float is declared
        return found if self.function is None else self.function(found)

    @property
    def example(self) -> Any:
        """A value of its kind, for compilers, which look at nothing but the kind."""
        found = self.kind(3)
        return found if self.function is None else self.function(found)


@dataclass(frozen=True)
class Persistent:
    """A grid of as many blocks as the device runs at once, in whole clusters, up to `most`."""

    most: int


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel. `kernel`, `constants` and `options` mean what the language's glue says they mean."""

    kernel: Any
    grid: int | tuple[int, ...] | Persistent
    args: Mapping[str, Any]  # by the names of the kernel's parameters
    constants: Mapping[str, Any] = field(default_factory=dict)  # what the kernel is compiled for, by name
    options: Mapping[str, Any] = field(default_factory=dict)  # warps, stages, threads, shared memory …
    cluster: int = 1  # thread blocks that run at once on one GPC and see each other's shared memory
    pdl: bool = False  # programmatic dependent launch: blocks may start while the kernel before ends


def argument_mismatch(kernel: str, takes: Iterable[str], given: Iterable[str]) -> str:
    """What is wrong with the names that a launch gives to a kernel; empty if nothing is."""
    lacking, unknown = sorted(set(takes) - set(given)), sorted(set(given) - set(takes))
    wrong = [f"lacks {', '.join(lacking)}"] if lacking else []
    wrong += [f"names {', '.join(unknown)}, which it does not take"] if unknown else []
    return f"{kernel} takes {', '.join(takes)}; the launch {' and '.join(wrong)}" if wrong else ""


def assert_plain(launch: Launch) -> None:
    """For languages that have neither clusters nor PDL: what a launch asks for is not ignored."""
    assert launch.cluster == 1 and not launch.pdl, f"{launch.kernel} asks for clusters or PDL, which its language lacks"


@dataclass(frozen=True)
class Host:
    """A launch by torch, for the few problems that need no kernel: filling a product over nothing with zeros, say."""

    function: Callable[..., Any]
    args: tuple[Any, ...]

    def run(self, values: Values) -> None:
        self.function(*(resolve(arg, values) for arg in self.args))


def resolve(arg: Any, values: Values) -> Any:
    """What an argument is in a call: a tensor, a number, or a tuple of them."""
    if isinstance(arg, Argument):
        return arg.tensor(values)
    if isinstance(arg, Scalar):
        return arg.value(values)
    if isinstance(arg, tuple):
        return _like(arg, [resolve(each, values) for each in arg])
    return arg


def _like(group: tuple[Any, ...], values: list[Any]) -> tuple[Any, ...]:
    """The values in a tuple of the same kind, named or not."""
    return type(group)(*values) if hasattr(group, "_fields") else tuple(values)


def fill(target: Any, value: float) -> Host:
    """Set all elements of an argument."""
    return Host(torch.Tensor.fill_, (target, value))


def resolver(
    args: tuple[Any, ...], of_tensor: Callable[[Argument], Callable[[Values], Any]]
) -> Callable[[Values], list[Any]]:
    """What turns a call's values into the arguments of a launch, in the least time: numbers are filled in already.

    `of_tensor` says how this language is given a tensor.
    """
    fixed: list[Any] = list(args)
    slots: list[tuple[int, Callable[[Values], Any]]] = []
    for i, arg in enumerate(args):
        if (found := _getter(arg, of_tensor)) is not None:
            slots.append((i, found))

    def resolved(values: Values) -> list[Any]:
        made = fixed.copy()
        for i, get in slots:
            made[i] = get(values)
        return made

    return resolved


def _getter(arg: Any, of_tensor: Callable[[Argument], Callable[[Values], Any]]) -> Callable[[Values], Any] | None:
    """How an argument is found in a call's values; None for what is fixed."""
    if isinstance(arg, Argument):
        return of_tensor(arg)
    if isinstance(arg, Scalar):
        return arg.value
    if hasattr(arg, "bound"):  # of the language's own: a tensor map, a descriptor
        found: Callable[[Values], Any] = arg.bound
        return found
    if isinstance(arg, tuple) and any(_getter(each, of_tensor) is not None for each in arg):
        inner = resolver(tuple(arg), of_tensor)
        return lambda values: _like(arg, inner(values))
    return None
