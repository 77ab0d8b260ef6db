"""Plans: what was decided for one problem, kept so that nothing is decided twice."""

import contextlib
import importlib
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cache, partial
from math import prod
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch._C._dynamo import guards

from tilery import backends, device, settings, tuned
from tilery.errors import BadInput, NoBackend, require
from tilery.spec import TensorSpec, require_dense

if TYPE_CHECKING:
    from tilery.op import Op

_RECENT = 8
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)  # absent from CPU builds
_tick = itertools.count().__next__  # atomic: a clock for "least recently used" that needs no lock


@dataclass
class Plan:
    """One launch, decided: call it with the op's complete arguments."""

    op: str
    kernel: str
    config: Any
    source: str  # explicit, tuned (with what is stale) or default
    device: torch.device
    outs: tuple[TensorSpec, ...]
    workspace: tuple[TensorSpec, ...]
    run: Callable[..., None]
    mutated: tuple[int, ...] = ()
    refusals: dict[str, str] = field(default_factory=dict)
    check: Callable[[tuple[Any, ...]], None] | None = None  # what an op checks at every call, before the launch
    used: int = 0
    takes: Callable[[tuple[Any, ...]], bool] = lambda _: False  # whether a call is one of those this plan was made for

    def __post_init__(self) -> None:
        self._index = self.device.index if self.device.type == "cuda" else None
        self._new_outs = [_maker(spec) for spec in self.outs]
        # Of nothing, what was made once will do for every call.
        self._new_workspace = [_maker(s) if prod(s.shape) else cache(_maker(s)) for s in self.workspace]
        # Kernels need not think of it: where there is nothing to write, nothing is launched.
        self._idle = bool(self.outs) and not any(prod(spec.shape) for spec in self.outs)

    def __call__(self, args: tuple[Any, ...], out: Any = None) -> Any:
        self.used = _tick()
        if self._index is not None and self._index != _current_device():
            with torch.cuda.device(self._index):
                return self(args, out)
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
        self.run(outs, args, self.config, *(workspace or [new() for new in self._new_workspace]))
        if self.mutated:
            torch.autograd.graph.increment_version([args[i] for i in self.mutated])

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


# Asked with (op, arguments, backend, config) before a new plan is decided: `tilery.tuning` tunes what is not yet tuned.
before_plan: Callable[["Op", tuple[Any, ...], str | None, Any], None] | None = None


# Policy


def load_kernel(op: "Op", name: str) -> ModuleType:
    return importlib.import_module(op.modules[name])


def refusal(op: "Op", name: str, specs: tuple[Any, ...], config: Any = None) -> str | None:
    """Why the kernel cannot take this problem on the specs' own device, in a sentence; None if it can."""
    where = next(s.device for s in specs if isinstance(s, TensorSpec))
    return environment_refusal(op, name, where, specs) or problem_refusal(op, name, specs, config)


def environment_refusal(op: "Op", name: str, where: torch.device, specs: tuple[Any, ...] = ()) -> str | None:
    """Why the kernel cannot run on this machine and device, whatever the problem."""
    if why := backends.missing(name):
        return why
    return backends.refusal(name, where, load_kernel(op, name).archs, specs)


def problem_refusal(op: "Op", name: str, specs: tuple[Any, ...], config: Any = None) -> str | None:
    """Why the kernel cannot take this problem, wherever it would run."""
    kernel = load_kernel(op, name)
    if config is not None and not isinstance(config, kernel.Config):
        raise BadInput(f"{op.name}: config must be {name}'s {_signature(kernel.Config)}, got {config!r}")
    why: str | None = kernel.refusal(*specs, config=config)
    return why


def _signature(config: type) -> str:
    fields = getattr(config, "__dataclass_fields__", {})
    return f"Config({', '.join(fields)})"


def decide(op: "Op", specs: tuple[Any, ...], backend: str | None, config: Any) -> Plan:
    """Explicit, then tuned for this bucket and device, then the first kernel that takes it with its default."""
    if backend is not None and backend not in op.kernels:
        raise BadInput(f"{op.name}: backend must be one of {', '.join(op.kernels)}, got {backend!r}")
    require(config is None or backend is not None, f"{op.name}: config= needs backend=, got only config={config!r}")
    asked = (backend,) if backend is not None else op.asked(specs)
    refusals: dict[str, str | None] = {}

    def able(name: str) -> bool:
        """Asked only as far as needed: a question imports the kernel's language."""
        if name not in refusals:
            refusals[name] = refusal(op, name, specs, config)
        return refusals[name] is None

    explain = settings.get().explain
    if explain:
        for name in asked:
            able(name)
    where = next(s.device for s in specs if isinstance(s, TensorSpec))
    entry = tuned.best(op, specs, asked, able, device.slug(where), refusals) if config is None else None
    chosen = entry.kernel if entry is not None else next(filter(able, asked), None)
    if chosen is None:
        reasons = "".join(f"\n  {name}: {why}" for name, why in refusals.items())
        given = ", ".join(str(s) for s in specs if isinstance(s, TensorSpec))
        raise NoBackend(f"{op.name}: no kernel takes ({given}):{reasons}")
    kernel, source = load_kernel(op, chosen), "explicit"
    if entry is not None:
        config, source = entry.config, tuned.source(entry)
    elif config is None:
        config, source = kernel.default(*specs), "default"
    workspace = kernel.workspace(*specs, config=config) if hasattr(kernel, "workspace") else ()
    refused = {name: why for name, why in refusals.items() if why is not None}
    outs = op.outputs(*specs)
    plan = Plan(
        op.name, chosen, config, source, where, outs, workspace, kernel.run, op.mutated, refused, op.checks_at_calls()
    )  # fmt: skip
    if explain:
        print(explained(plan, specs), file=sys.stderr)
    return plan


def explained(plan: Plan, specs: tuple[Any, ...]) -> str:
    given = ", ".join(str(s) for s in specs)
    lines = [f"tilery: {plan.op}({given})", f"  runs {plan.kernel} with {plan.config}, {plan.source}"]
    return "\n".join(lines + [f"  {name} refused: {why}" for name, why in plan.refusals.items()])


def explain_dispatch(on: bool = True) -> None:
    """Prints for every new plan which kernel and config were chosen, from where, and who refused and why."""
    settings.change(explain=on)
