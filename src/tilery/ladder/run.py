"""One run of the ladder: timed where there is a GPU, compiled where there is none; every row kept in the store."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from tilery import languages
from tilery.base.errors import BadInput, CompileFailed
from tilery.base.spec import Artifact, Case
from tilery.core.cases import call_for
from tilery.hardware import device
from tilery.ladder.measure import OP, unit
from tilery.ladder.rungs import RUNGS, Rung, Shipped, product
from tilery.measure import timing
from tilery.measure.child import Child
from tilery.measure.place import describe
from tilery.measure.recorder import Recorder, kept_code
from tilery.measure.result import Row
from tilery.measure.store import Store
from tilery.workbench import isolate

COMPILED_FOR = ("sm_80", "sm_90")
_SILENCE_S = 120.0  # without a word from a rung: a barrier that is never complete hangs


def chosen(asked: Sequence[str] | None) -> list[str]:
    """Names of rungs, in order, by name or number; all of them if none is asked for."""
    numbers = {str(rung.number): name for name, rung in RUNGS.items()}
    for word in asked or ():
        if word not in RUNGS and word not in numbers:
            listed = ", ".join(f"{rung.number} {name}" for name, rung in RUNGS.items())
            raise BadInput(f"RUNG must be a name or a number of {listed}, got {word!r}")
    wanted = {numbers.get(word, word) for word in asked or RUNGS}
    return [name for name in RUNGS if name in wanted]


def run(names: list[str], cases: list[Case], store: Store, depth: timing.Depth, say: Callable[[str], None]) -> Recorder:
    here = [device.default()] if torch.cuda.is_available() else []
    recorder = Recorder(store, here, str(depth), say)
    missing = languages.missing("cuda")
    with recorder.running():
        for case in cases:
            if missing:
                recorder.add(*(Row(OP, name, str(case), "skipped", missing) for name in names))
            elif here:
                _time(names, case, recorder, depth, say)
            else:
                _compile_all(names, case, recorder, say)
    return recorder


def _time(names: list[str], case: Case, recorder: Recorder, depth: timing.Depth, say: Callable[[str], None]) -> None:
    child = Child("tilery.ladder.measure", _SILENCE_S)
    try:
        for row in isolate.rows_of(child, unit(case, names, depth), lambda arm, what: say(what)):
            recorder.add(row)
    finally:
        child.close()
    arch = device.arch(device.default())
    for row in [row for row in recorder.rows if row.case == str(case) and row.ms is not None and row.kernel in RUNGS]:
        made = _compiled(RUNGS[row.kernel], case, arch)
        if isinstance(made, Artifact):  # it ran, so what fails is only to look at it: the row stays without
            recorder.describe(row, made, kept_code(made))


def _compile_all(names: list[str], case: Case, recorder: Recorder, say: Callable[[str], None]) -> None:
    """One row for each rung and architecture that it builds for."""
    wanted = [(name, arch) for name in names for arch in COMPILED_FOR if arch in RUNGS[name].archs]

    def row(name: str, arch: str) -> Row:
        say(f"compiling {name} for {arch}")
        found = Row(OP, name, str(case), "compiled", "no GPU here", arch=arch)
        made = _compiled(RUNGS[name], case, arch)
        if isinstance(made, Artifact):
            describe(found, made, recorder.keep_code(made))
        else:
            found.status, found.reason = made
        return found

    with ThreadPoolExecutor(device.cores()) as pool:
        for found in pool.map(lambda pair: row(*pair), wanted):
            recorder.add(found)


def _compiled(rung: Rung | Shipped, case: Case, arch: str) -> Artifact | tuple[str, str]:
    """What a compiler made of it, or the row's status and reason."""
    op = product()
    call = call_for(op, case)
    a, b = call.a, call.b
    with device.pretend(arch):
        if why := rung.refusal(a, b):
            return "refused", why
    try:
        return rung.compile(a, b, arch)
    except CompileFailed as error:
        return "fail", str(error)
