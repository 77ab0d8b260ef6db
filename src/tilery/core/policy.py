"""Policy: which kernel and config a problem gets. Explicit, then tuned, then the first of our kernels that takes it."""

import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from tilery import languages
from tilery.base import settings
from tilery.base.errors import BadInput, CompileFailed, NoBackend, require
from tilery.base.launch import Argument, Launch
from tilery.base.spec import Artifact, TensorSpec
from tilery.core import tuned
from tilery.core.call import Call
from tilery.core.kernel import Kernel, config_refusal
from tilery.core.plan import Plan
from tilery.hardware import device

if TYPE_CHECKING:
    from tilery.core.op import Op

_NOT_NAMED = "takes it, but runs only where it is tuned or named: backend={!r}"  # a library's kernel, or emulated

# Asked with (op, arguments, backend, config) before a new plan is decided: `tilery.tuning` tunes what is not yet tuned.
before_plan: Callable[["Op", tuple[Any, ...], str | None, Any], None] | None = None


def load_kernel(op: "Op", name: str) -> Kernel:
    """The kernel, whose module is imported on first use; it lies beside the op's contract unless a dot says where."""
    module, _, attribute = op.kernels[name].partition(":")
    found: Kernel = getattr(importlib.import_module(module if "." in module else f"{op.package}.{module}"), attribute)
    return found


def refusal(op: "Op", name: str, call: Call, config: Any = None) -> str | None:
    """Why the kernel cannot take this call on the specs' own device, in a sentence; None if it can."""
    return environment_refusal(op, name, op.device(call), call) or problem_refusal(op, name, call, config)


def environment_refusal(op: "Op", name: str, where: torch.device, call: Call | None = None) -> str | None:
    """Why the kernel cannot run on this machine and device, whatever the problem."""
    if why := languages.missing(name):
        return why
    return languages.refusal(name, where, load_kernel(op, name).archs, op.specs_in(call) if call else ())


def problem_refusal(op: "Op", name: str, call: Call, config: Any = None) -> str | None:
    """Why the kernel cannot take this problem, wherever it would run."""
    kernel = load_kernel(op, name)
    if config is None:
        return kernel.refusal(call)
    if not isinstance(config, kernel.Config):
        raise BadInput(f"{op.name}: config must be {name}'s {_signature(kernel.Config)}, got {config!r}")
    return config_refusal(kernel, config) or kernel.refusal(call, config)


def _signature(config: type) -> str:
    fields = getattr(config, "__dataclass_fields__", {})
    return f"Config({', '.join(fields)})"


def decide(op: "Op", call: Call, backend: str | None, config: Any) -> Plan:
    """Explicit, then tuned for this bucket and device, then the first of our kernels that takes it with its default.

    A library's kernel, and an emulated one, runs where it is named or tuned alone: no call becomes torch's unnoticed.
    """
    if backend is not None and backend not in tuple(op.kernels):  # it may be anything, also what has no hash
        raise BadInput(f"{op.name}: backend must be one of {', '.join(op.kernels)}, got {backend!r}")
    require(config is None or backend is not None, f"{op.name}: config= needs backend=, got only config={config!r}")
    asked = (backend,) if backend is not None else op.asked(call)
    refusals: dict[str, str | None] = {}

    def able(name: str) -> bool:
        """Asked only as far as needed: a question imports the kernel's language."""
        if name not in refusals:
            refusals[name] = refusal(op, name, call, config)
        return refusals[name] is None

    explain = settings.get().explain
    if explain:
        for name in asked:
            able(name)
    where = op.device(call)
    entry = _best_tuned(op, call, asked, able, refusals) if config is None else None
    untuned = [name for name in asked if backend is not None or languages.runs_unnamed(name, where)]
    chosen = entry.kernel if entry is not None else next(filter(able, untuned), None)
    if chosen is None:
        for name in asked:
            refusals[name] = _NOT_NAMED.format(name) if able(name) else refusals[name]
        reasons = "".join(f"\n  {name}: {why}" for name, why in refusals.items())
        given = ", ".join(str(s) for s in op.specs_in(call) if isinstance(s, TensorSpec))
        raise NoBackend(f"{op.name}: no kernel takes ({given}):{reasons}")
    kernel, source = load_kernel(op, chosen), "explicit"
    if entry is not None:
        config, source = entry.config, tuned.source(entry)
    elif config is None:
        config, source = kernel.default(call), "default"
    outs, (workspace, complete) = op.output_specs(call), with_workspace(op, kernel, call, config)
    refused = {name: why for name, why in refusals.items() if why is not None}
    launches = tuple(kernel.launches(complete, config))
    plan = Plan(
        op=op.name, kernel=chosen, config=config, source=source, device=where, outs=outs, workspace=workspace,
        launches=launches, mutated=op.mutated, refusals=refused, check=op.checks_at_calls(),
        library=kernel.library(where),
    )  # fmt: skip
    if explain:
        print(explained(plan, op.specs_in(call), kernel.expected_us(call, config)), file=sys.stderr)
    return plan


def with_workspace(op: "Op", kernel: Kernel, call: Call, config: Any) -> tuple[tuple[TensorSpec, ...], Call]:
    """The kernel's workspace, and the call with it: what `launches` is given."""
    specs = kernel.workspace(call, config)
    first = len(op.names) + len(op.output_specs(call))
    named = {name: Argument.at_slot(spec, first + i) for i, (name, spec) in enumerate(specs.items())}
    return tuple(specs.values()), call.extended(named)


def compiled(op: "Op", name: str, call: Call, config: Any, arch: str) -> Artifact:
    """What the language's compiler makes of a kernel; of several launches, the one that takes most of an SM."""
    kernel, glue = load_kernel(op, name), languages.load(name)
    _, complete = with_workspace(op, kernel, call, config)
    launches = [launch for launch in kernel.launches(complete, config) if isinstance(launch, Launch)]
    if not launches:
        raise CompileFailed(f"{op.name} {name} launches no kernel for this problem: torch fills its outputs")
    made: list[Artifact] = [glue.compile(launch, arch) for launch in launches]
    return max(made, key=lambda artifact: (artifact.spills or 0, artifact.registers or 0))


def _best_tuned(
    op: "Op", call: Call, asked: tuple[str, ...], able: Callable[[str], bool], refusals: dict[str, str | None]
) -> tuned.Entry | None:
    """The best tuned entry among these kernels, its config asked again: other strides may not bear it.

    An entry that its kernel refuses is named in `refusals`, and the next one is asked.
    """
    for entry, where in tuned.found(op, op.bucket(call), asked, device.slug(op.device(call))):
        if not able(entry.kernel):
            continue
        made = tuned.with_config(op, entry, where)
        why = problem_refusal(op, entry.kernel, call, made.config)
        if why is None:
            return made
        refusals[f"{entry.kernel} as tuned in {where}:{entry.line}"] = why
    return None


def explained(plan: Plan, specs: tuple[Any, ...], expected_us: float | None = None) -> str:
    given = ", ".join(str(s) for s in specs)
    kernel = f"{plan.kernel} ({plan.library})" if plan.library else plan.kernel
    expected = "" if expected_us is None else f", expected to take {expected_us:.1f} µs on an H200"
    lines = [f"tilery: {plan.op}({given})", f"  runs {kernel} with {plan.config}, {plan.source}{expected}"]
    return "\n".join(lines + [f"  {name} refused: {why}" for name, why in plan.refusals.items()])


def explain_dispatch(on: bool = True) -> None:
    """Prints for every new plan which kernel and config were chosen, from where, and who refused and why."""
    settings.change(explain=on)
