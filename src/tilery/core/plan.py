"""Plans: what was decided for one problem, kept so that nothing is decided twice."""

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._C._dynamo import guards

from tilery import languages
from tilery.base import settings
from tilery.base.errors import BadInput, require
from tilery.base.launch import Host, Launch, Values
from tilery.base.spec import TensorSpec, require_dense
from tilery.core import tuned

_RECENT = 8
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)  # absent from CPU builds
_tick = itertools.count().__next__  # atomic: a clock for "least recently used" that needs no lock


@dataclass
class Plan:
    """Kernel, config and launches for one problem: call it with the op's complete arguments."""

    op: str
    kernel: str
    config: Any
    source: str  # explicit, tuned (with what is stale) or default
    device: torch.device
    outs: tuple[TensorSpec, ...]
    workspace: tuple[TensorSpec, ...]
    launches: tuple[Launch | Host, ...]
    mutated: tuple[int, ...] = ()
    refusals: dict[str, str] = field(default_factory=dict)
    check: Callable[[tuple[Any, ...]], None] | None = None  # what an op checks at every call, before the launch
    library: str = ""  # whose code runs, if it is not ours
    used: int = 0
    takes: Callable[[tuple[Any, ...]], bool] = lambda _: False  # whether a call is one of those this plan was made for

    def __post_init__(self) -> None:
        self._index = self.device.index if self.device.type == "cuda" else None
        self._new_outs = [_maker(spec) for spec in self.outs]
        # An empty workspace is made once and serves every call.
        self._new_workspace = [_maker(s) if prod(s.shape) else cache(_maker(s)) for s in self.workspace]
        # Kernels need not think of it: where there is nothing to write, nothing is launched.
        self._idle = bool(self.outs) and not any(prod(spec.shape) for spec in self.outs)
        self.run: Callable[[Values], None] = self._first_run

    def __call__(self, args: tuple[Any, ...], out: Any = None) -> Any:
        self.used = _tick()
        if self._index is not None and self._index != _current_device():
            with torch.cuda.device(self._index):
                return _plain_call(self, args, out)
        outs = tuple([new() for new in self._new_outs]) if out is None else self._destination(args, out)
        self._start(outs, args)
        return unpacked(outs)

    def launch(
        self, outs: tuple[Tensor, ...], args: tuple[Any, ...], workspace: tuple[Tensor, ...] | None = None
    ) -> None:
        """Runs the kernel into `outs`, on the tensors' own device and that device's current stream."""
        with torch.cuda.device(self._index) if self._index is not None else contextlib.nullcontext():
            self._start(outs, args, workspace)

    def _start(
        self, outs: tuple[Tensor, ...], args: tuple[Any, ...], workspace: tuple[Tensor, ...] | None = None
    ) -> None:
        if self.check is not None:
            self.check(args)
        if self._idle:
            return
        self.run((*args, *outs, *(workspace or [new() for new in self._new_workspace])))
        if self.mutated:
            torch.autograd.graph.increment_version([args[i] for i in self.mutated])

    def _first_run(self, values: Values) -> None:
        """Hand the launches to their language, which may compile now, and run them so from now on."""
        bound = [
            languages.load(self.kernel).bind(launch, self.device) if isinstance(launch, Launch) else launch.run
            for launch in self.launches
        ]
        self.run = bound[0] if len(bound) == 1 else _one_after_another(bound)
        self.run(values)

    def _destination(self, args: tuple[Any, ...], out: Any) -> tuple[Tensor, ...]:
        outs = packed(out)
        require(len(outs) == len(self.outs), f"{self.op}: out must be {len(self.outs)} tensor(s), got {len(outs)}")
        for i, (given, want) in enumerate(zip(outs, self.outs)):
            require(isinstance(given, Tensor), f"{self.op}: out[{i}] must be a Tensor, got {type(given).__name__}")
            require_dense(f"{self.op}: out[{i}]", given)
            graded = given.requires_grad and torch.is_grad_enabled()
            require(not graded, f"{self.op}: out[{i}] must not require grad; call it under torch.no_grad()")
            spec = TensorSpec.of(given)
            require(spec == want, f"{self.op}: out[{i}] must be {want}, got {spec}")
            for other in (*args, *outs[:i]):
                if isinstance(other, Tensor) and _overlap(given, other):
                    raise BadInput(f"{self.op}: out[{i}] must not share memory with another argument")
        for given in outs:
            torch.autograd.graph.increment_version(given)  # a backward that saved it must not use it unawares
        return outs


def _one_after_another(runs: list[Callable[[Values], None]]) -> Callable[[Values], None]:
    def run(values: Values) -> None:
        for each in runs:
            each(values)

    return run


def _maker(spec: TensorSpec) -> Callable[[], Tensor]:
    """Makes an output on the current device by the functions that torch.compile's code uses, in half the time."""
    make = getattr(guards, f"_empty_strided_{spec.device.type}", None)
    return partial(make, tuple(spec.shape), tuple(spec.strides), spec.dtype) if make else spec.empty


def packed(out: Any) -> tuple[Any, ...]:
    return tuple(out) if isinstance(out, tuple | list) else (out,)


def unpacked(outs: tuple[Any, ...]) -> Any:
    return outs[0] if len(outs) == 1 else (outs or None)


def _overlap(a: Tensor, b: Tensor) -> bool:
    def span(t: Tensor) -> tuple[int, int]:
        reach = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride()))
        return t.data_ptr(), t.data_ptr() + (reach + 1) * t.itemsize

    if not a.numel() or not b.numel():
        return False
    (a0, a1), (b0, b1) = span(a), span(b)
    return a0 < b1 and b0 < a1


# Watching calls

Watch = Callable[[Plan, Callable[[], Any]], Any]  # given a plan and its call, which it makes; returns what that returns
_watches: list[Watch] = []
_watches_lock = threading.Lock()
_plain_call = Plan.__call__


def _watched_call(self: Plan, args: tuple[Any, ...], out: Any = None) -> Any:
    call: Callable[[], Any] = partial(_plain_call, self, args, out)
    for watch in tuple(_watches):
        call = partial(watch, self, call)
    return call()


@contextlib.contextmanager
def watched(watch: Watch) -> Iterator[None]:
    """Inside, every call of every plan in this process goes through `watch`. Outside, that costs a call nothing."""
    with _watches_lock:
        _watches.append(watch)
        Plan.__call__ = _watched_call  # type: ignore[method-assign]
    try:
        yield
    finally:
        with _watches_lock:
            _watches.remove(watch)
            if not _watches:
                Plan.__call__ = _plain_call  # type: ignore[method-assign]


class Plans:
    """The latest `limit` plans. A hit takes no lock: it must not wait while another thread imports or compiles."""

    _all: ClassVar["weakref.WeakSet[Plans]"] = weakref.WeakSet()

    def __init__(self, limit: int = 1024) -> None:
        self.limit = limit
        self._plans: dict[Hashable, Plan] = {}
        self.recent: tuple[Plan, ...] = ()  # asked in turn before a key is made: a key takes longer
        self._lock = threading.RLock()
        Plans._all.add(self)

    def __len__(self) -> int:
        return len(self._plans)

    def get(self, key: Hashable) -> Plan | None:
        plan = self._plans.get(key)
        if plan is not None:
            plan.used = _tick()
        return plan

    def promote(self, key: Hashable, plan: Plan, takes: Callable[[tuple[Any, ...]], bool]) -> None:
        """Makes this the first that the next call is held against; unless it was dropped meanwhile."""
        with self._lock:
            if self._plans.get(key) is plan:
                plan.takes = takes
                self.recent = (plan, *[p for p in self.recent if p is not plan][: _RECENT - 1])

    def make(self, key: Hashable, make: Callable[[], Plan]) -> Plan:
        """Two threads with one new problem make one plan; a failure is not remembered."""
        with self._lock:
            plan = self.get(key)
            if plan is None:
                plan = make()
                plan.used = _tick()
                if len(self._plans) >= self.limit:
                    self._evict()
                self._plans[key] = plan
            return plan

    def _evict(self) -> None:
        """Drops the quarter used least recently: one sort per limit / 4 new plans."""
        oldest = sorted(self._plans.items(), key=lambda item: item[1].used)[: max(self.limit // 4, 1)]
        for key, _ in oldest:
            del self._plans[key]

    def clear(self) -> None:
        with self._lock:
            self._plans.clear()
            self.recent = ()


def drop_plans() -> None:
    """After a change of settings or tuned data: every op decides anew."""
    for plans in Plans._all:
        plans.clear()


settings.on_change(drop_plans)
tuned.on_change(drop_plans)
