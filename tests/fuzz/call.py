"""One random call as plain data: drawn in one process, sent to another as a line of JSON, printed, made smaller."""

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tilery.core.op import REGISTRY, Op

# A number may be planted in an element, in a whole row ("row:…") or in the whole tensor ("all:…"); "by:…" multiplies.
NUMBERS = {
    "nan": math.nan, "inf": math.inf, "-inf": -math.inf, "0": 0.0, "-0": -0.0, "tiny": 1e-40, "small": 1e-20,
    "one": 1.0, "large": 3e4, "huge": 1e30,
}  # fmt: skip


@dataclass(frozen=True)
class Call:
    op: str
    kernel: str
    params: dict[str, Any]  # what the op's `inputs` are drawn from
    seed: int = 0
    layouts: dict[str, str] = field(default_factory=dict)  # argument -> one of guards.LAYOUTS
    plants: list[list[Any]] = field(default_factory=list)  # [argument, where (0 to 1), what]
    indices: list[list[Any]] = field(
        default_factory=list
    )  # [argument, where (0 to 1), integer, or "+0" for past the end]
    scalars: dict[str, Any] = field(default_factory=dict)  # argument -> value
    config: int | None = None  # which of the kernel's configs; None: the default
    gradient: bool = False  # run by autograd instead, and compare the gradients

    def __str__(self) -> str:
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return json.dumps({name: value for name, value in plain.items() if value not in (None, False, {}, [])})

    @property
    def reproduction(self) -> str:
        return f"PYTHONPATH=tests python -m fuzz --call '{self}'"


def parsed(text: str) -> Call:
    return Call(**json.loads(text))


def arguments(call: Call, device: Any) -> tuple[Any, ...]:
    """The op's complete arguments, drawn by its contract, then spoilt as the call says."""
    op = REGISTRY[call.op]
    drawn = op.inputs(**call.params, device=device, seed=call.seed) | call.scalars
    args = dict(zip(op.names, op.complete((), drawn)))
    for name, where, what in call.plants:
        if is_float(args[name]):
            _plant(args[name], where, what)
    for name, where, value in call.indices:
        if is_integer(args[name]) and args[name].numel():
            limits = torch.iinfo(args[name].dtype)
            at = min(int(where * args[name].numel()), args[name].numel() - 1)
            value = _past(args, name) + int(value[1:]) if isinstance(value, str) else value
            args[name].view(-1)[at] = min(max(value, limits.min), limits.max)
    return tuple(args.values())


def _past(args: dict[str, Any], name: str) -> int:
    """The first number that is too large for an entry of what leads into a cache."""
    cache = args.get("k_cache", args.get("cache"))
    table = args.get("prefix_table" if name.startswith("prefix") else "block_table")
    if name.endswith("_table"):
        return cache.shape[0]
    if name == "slots":
        return cache.shape[0] * cache.shape[1]
    return cache.shape[1] * (1 if table is None else table.shape[1]) + 1  # lengths


def is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def is_integer(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype in (torch.int32, torch.int64)


def _plant(x: Tensor, where: float, what: str) -> None:
    """Numbers that the dtype cannot hold are its largest."""
    if not x.numel():
        return
    largest = torch.finfo(x.dtype).max
    kind, _, name = what.rpartition(":")
    if kind == "by":
        x.copy_((x.float() * float(name)).clamp(-largest, largest))
        return
    number = NUMBERS[name]
    value = max(-largest, min(largest, number)) if math.isfinite(number) else number
    at = []
    for size in x.shape:
        where *= size
        at.append(min(int(where), size - 1))
        where -= int(where)
    target = {"": x[tuple(at)], "row": x[tuple(at[:-1])], "all": x}[kind]
    target.copy_(torch.full(target.shape, value, device=x.device))


def op_of(call: Call) -> Op:
    return REGISTRY[call.op]
