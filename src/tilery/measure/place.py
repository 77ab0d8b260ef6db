"""What can be done with a kernel on this machine: run it, compile it, or say why neither."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from tilery import languages
from tilery.base.errors import CompileFailed, require
from tilery.base.spec import Artifact, Case
from tilery.core import policy
from tilery.core.cases import specs_for
from tilery.core.op import Op
from tilery.hardware import device
from tilery.measure.compile import Compiler
from tilery.measure.result import Row

COMPILE_ARCH = "sm_90"  # what GPU kernels are compiled for where there is no GPU


@dataclass(frozen=True)
class Place:
    device: torch.device | None = None  # it runs there
    arch: str = ""  # it compiles for this, where it does not run as it would on a GPU
    reason: str = ""  # why it does not run, or why nothing can be done
    interpreted: str = ""  # by what: right but slow, so it is checked and never timed


def chosen_kernels(op: Op, asked: Sequence[str] | None) -> tuple[str, ...]:
    """Those asked for that the op has; a language names all of its variants. None: all."""
    return tuple(k for k in op.kernels if not asked or k in asked or k.partition(".")[0] in asked)


def timed_kernels(op: Op, asked: Sequence[str] | None) -> tuple[str, ...]:
    """Those that a bench times: without a library's, which is the peer torch once more, unless it is asked for."""
    return tuple(k for k in chosen_kernels(op, asked) if asked or languages.is_ours(k))


def require_known(ops: Iterable[Op], asked: Sequence[str] | None, what: str = "backend") -> None:
    """Some op must have what was asked for."""
    kernels = list(dict.fromkeys(k for op in ops for k in op.kernels))
    for name in asked or ():
        known = any(name in (k, k.partition(".")[0]) for k in kernels)
        require(known, f"{what} must be one of {', '.join(kernels)}, got {name!r}")


def place(op: Op, kernel: str) -> Place:
    if why := languages.missing(kernel):
        return Place(reason=why)
    archs = op.kernel(kernel).archs
    cpu = torch.device("cpu")
    if "cpu" in archs and (archs == ("cpu",) or not torch.cuda.is_available()):
        return Place(device=cpu)
    if torch.cuda.is_available():
        where = device.default()
        why = policy.environment_refusal(op, kernel, where)
        return Place(device=where) if why is None else Place(reason=why)
    arch = COMPILE_ARCH if COMPILE_ARCH in archs else archs[0]
    if policy.environment_refusal(op, kernel, cpu) is not None:
        return Place(arch=arch, reason="no GPU here")
    by = "emulator" if languages.language(kernel).emulated else "interpreter"
    return Place(device=cpu, arch=arch, reason="no GPU here", interpreted=by)


def not_run(op: Op, kernel: str, case: Case, compiler: Compiler, keep: Callable[[Artifact], str] = lambda _: "") -> Row:
    """Compiled where it can be, else the reason why not; `keep` is given what was made and says under which key."""
    where = place(op, kernel)
    row = Row(op.name, kernel, str(case), "skipped", where.reason)
    if not where.arch:
        return row
    specs = specs_for(op, case)
    with device.pretend(where.arch):
        why = policy.problem_refusal(op, kernel, op.call(specs))
    if why is not None:
        row.status, row.reason = "refused", why
        return row
    try:
        artifact = compiler.compile(op.name, kernel, specs, where.arch)
    except CompileFailed as error:
        row.status, row.reason = "fail", str(error)
        return row
    row.status, row.arch = "compiled", where.arch
    describe(row, artifact, keep(artifact))
    return row


def describe(row: Row, artifact: Artifact, code: str) -> None:
    row.registers, row.spills, row.shared, row.code = artifact.registers, artifact.spills, artifact.shared, code
