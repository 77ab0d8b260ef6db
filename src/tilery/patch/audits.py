"""What ran in patched models: per layer each op with its kernel, config and share of time, and what stayed in torch."""

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from tilery.base.errors import Wrong
from tilery.core.plan import Plan, watched
from tilery.patch.application import RECORD, Record
from tilery.patch.attention import BACKENDS
from tilery.patch.report import table
from tilery.patch.swap import STATE

WHOLE = "(model)"
OUTSIDE = "(outside of a layer)"  # a backward, or a call by hand
_ATTENTION = {"attention", "attention_decode"}
_COMPUTES = {
    "norms": {"rms_norm", "add_rms_norm"},
    "mlp": {"linear_silu_mul", "silu_mul", "gelu_mul"},
    "qkv": {"linear"},
    "rope": {"rope", "rope_", "qk_norm_rope_"},
    "experts": {"moe_route", "fused_moe"},
}


@dataclass
class Ran:
    """Calls of one op with one plan in one layer."""

    layer: str
    op: str
    kernel: str
    config: str
    source: str  # explicit, tuned (with what is stale) or default
    calls: int = 0
    ms: float = 0.0


@dataclass
class Stayed:
    """Calls of a module that torch computed."""

    layer: str
    module: str
    why: str
    calls: int = 0
    ms: float = 0.0


@dataclass
class Audit:
    """Filled when the `with` ends. Times are of the GPU where the model is on one, else wall time."""

    ran: list[Ran] = field(default_factory=list)
    stayed: list[Stayed] = field(default_factory=list)
    calls: int = 0  # of patched models
    ms: float = 0.0  # of those calls

    def __str__(self) -> str:
        if not self.calls:
            return "no patched model was called"
        said = [f"{self.calls} calls of patched models, {self.ms:.1f} ms", ""]
        heads = ("layer", "op", "kernel", "calls", "share")
        said += table(heads, self._lines(self.ran, lambda r: (r.op, r.kernel, f"{r.config}, {r.source}")))
        if self.stayed:
            said += ["", "in torch", ""]
            said += table(("layer", "module", "calls", "share"), self._lines(self.stayed, lambda s: (s.module, s.why)))
        return "\n".join(said)

    def _lines(self, rows: Any, of: Callable[[Any], tuple[str, ...]]) -> list[tuple[str, ...]]:
        """Rows that differ in the number of their layer alone as one: where, what, calls, share, how or why."""
        found: dict[tuple[str, ...], tuple[int, float]] = {}
        for row in rows:
            key = (re.sub(r"\.\d+(?=\.|$)", ".*", row.layer), *of(row))
            calls, ms = found.get(key, (0, 0.0))
            found[key] = calls + row.calls, ms + row.ms
        return [(*key[:-1], str(calls), self._share(ms), key[-1]) for key, (calls, ms) in found.items()]

    def _share(self, ms: float) -> str:
        return f"{ms / self.ms:.0%}" if self.ms else ""


@contextmanager
def audit(strict: bool | None) -> Iterator[Audit]:
    found = Audit()
    listener = _Listener(found)
    handles = [
        register_module_forward_pre_hook(listener.enter),
        register_module_forward_hook(listener.leave, always_call=True),
    ]
    try:
        with watched(listener.op):
            yield found
    finally:
        for handle in handles:
            handle.remove()
        listener.finish()
    listener.require_all(strict)


class _Listener:
    def __init__(self, found: Audit) -> None:
        self.found = found
        self._models: dict[int, tuple[nn.Module, Record]] = {}
        self._modules: dict[int, tuple[str, nn.Module, str]] = {}  # name, module, why it is in torch if it is
        self._ran: dict[tuple[str, ...], Ran] = {}
        self._stayed: dict[str, Stayed] = {}
        self._aside: set[str] = set()  # names of patched modules that left a call to torch
        self._timed: list[tuple[Any, Callable[[], float]]] = []
        self._lock, self._thread = threading.Lock(), threading.local()

    # Modules

    def enter(self, module: nn.Module, args: Any) -> None:
        if RECORD in vars(module) and id(module) not in self._models:
            self._add(module)
        known = self._modules.get(id(module))
        if known is not None:
            self._stack().append((known[0], _clock(_device(module))))

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        known = self._modules.get(id(module))
        if known is None or not self._stack():
            return
        name, started = self._stack().pop()
        elapsed = started()
        with self._lock:
            if id(module) in self._models and not self._stack():
                self.found.calls += 1
                self._timed.append((self.found, elapsed))
            aside = _aside(module, args)
            if aside:
                self._aside.add(name)
            if why := known[2] or aside:
                row = self._stayed.setdefault(name, Stayed(name, type(module).__name__, why))
                row.calls += 1
                self._timed.append((row, elapsed))

    def _add(self, model: nn.Module) -> None:
        record: Record = vars(model)[RECORD]
        reasons = {left.module: left.why for left in record.report.left}
        watched: set[int] = set()
        for module in model.modules():
            state = vars(module).get(STATE)
            if state is not None and state.joined is not None:
                watched |= {id(getattr(module, name)) for name in state.joined.names}
        with self._lock:
            for name, module in model.named_modules():
                why = ""
                if STATE not in vars(module) and module._parameters:
                    why = reasons.get(type(module).__name__, "no piece of a patch replaces it")
                    why = "a hook watches it" if id(module) in watched else why
                self._modules[id(module)] = name or WHOLE, module, why
            self._models[id(model)] = model, record

    def _stack(self) -> list[tuple[str, Any]]:
        if not hasattr(self._thread, "stack"):
            self._thread.stack = []
        found: list[tuple[str, Any]] = self._thread.stack
        return found

    # Ops

    def op(self, plan: Plan, call: Callable[[], Any]) -> Any:
        started = _clock(plan.device)
        made = call()
        elapsed = started()
        stack = self._stack()
        layer = stack[-1][0] if stack else OUTSIDE
        kernel = f"{plan.kernel} ({plan.library})" if plan.library else plan.kernel
        key = layer, plan.op, kernel, str(plan.config), plan.source
        with self._lock:
            row = self._ran.setdefault(key, Ran(*key))
            row.calls += 1
            self._timed.append((row, elapsed))
        return made

    # The end

    def finish(self) -> None:
        for row, elapsed in self._timed:
            row.ms += elapsed()
        self._timed.clear()
        self.found.ran, self.found.stayed = list(self._ran.values()), list(self._stayed.values())
        ran = {(row.layer, row.op) for row in self.found.ran}
        for name, module, _ in self._modules.values():
            is_attention = "layer_idx" in vars(module) and type(module).__name__.endswith("Attention")
            if is_attention and BACKENDS not in vars(module) and not any((name, op) in ran for op in _ATTENTION):
                why = f"attn_implementation is {module.config._attn_implementation!r}"  # type: ignore[union-attr]
                self.found.stayed.append(Stayed(name, "attention function", why, self.found.calls))

    def require_all(self, strict: bool | None) -> None:
        ran: dict[str, set[str]] = {}
        for row in self.found.ran:
            ran.setdefault(row.layer, set()).add(row.op)
        idle = [
            line
            for model, record in self._models.values()
            if (record.strict if strict is None else strict)
            for line in _idle(model, record, ran, self._aside)
        ]
        if idle:
            shown = "".join(f"\n  {line}" for line in idle[:20]) + ("\n  …" if len(idle) > 20 else "")
            raise Wrong(f"{len(idle)} parts of a patch did not run:{shown}")


def _aside(module: nn.Module, args: Any) -> str:
    """Why a patched module left this call to torch; empty if it did not."""
    state = vars(module).get(STATE)
    return "" if state is None or state.aside is None or not args else state.aside(module, args[0])


def _idle(model: nn.Module, record: Record, ran: dict[str, set[str]], aside: set[str]) -> Iterator[str]:
    """What is patched and called no op, though torch was not to compute it."""
    for name, (module, pieces) in record.modules.items():
        parent = name.rpartition(".")[0]
        for piece in pieces:
            if piece == "loss" or name in aside:  # the loss is a part of training alone
                continue
            computes, where = _COMPUTES[piece], name
            if piece == "experts" and hasattr(module, "experts"):  # what adds shared experts
                where = f"{name}.experts"
            if getattr(module, "self_attn", None) is not None:  # a layer, whose norm adds
                computes, where = {"add_rms_norm"}, f"{name}.{vars(module)[STATE].layer.joining}"
            fused = piece == "norms" and "qk_norm_rope_" in ran.get(parent, ())
            if not computes & ran.get(where, set()) and not fused:
                yield f"{name}: {piece}, by {' or '.join(sorted(computes))}"
    for name, module in model.named_modules():
        if BACKENDS in vars(module) and not _ATTENTION & ran.get(name, set()):
            yield f"{name}: attention, by {' or '.join(sorted(_ATTENTION))}"


# Time


def _device(module: nn.Module) -> torch.device:
    found = next(module.parameters(), None)
    return torch.device("cpu") if found is None else found.device


def _clock(device: torch.device) -> Callable[[], Callable[[], float]]:
    """Starts now. When called it stops, and gives a function that says the milliseconds between, at the end."""
    if device.type != "cuda":
        start = time.perf_counter()

        def stop() -> Callable[[], float]:
            ms = 1e3 * (time.perf_counter() - start)
            return lambda: ms

        return stop
    if torch.cuda.is_current_stream_capturing():
        return lambda: lambda: 0.0
    with torch.cuda.device(device):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()

    def record() -> Callable[[], float]:
        with torch.cuda.device(device):
            last.record()

        def ms() -> float:
            last.synchronize()
            return float(first.elapsed_time(last))

        return ms

    return record
