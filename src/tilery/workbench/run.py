"""One run of bench: measures, keeps each row at once, then looks at what compilers made of the kernels it timed."""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from tilery.base import settings
from tilery.base.errors import CompileFailed
from tilery.base.spec import Artifact, Case
from tilery.core import peers
from tilery.core.cases import specs_for
from tilery.core.op import REGISTRY, Op
from tilery.hardware import device
from tilery.measure import timing
from tilery.measure.compile import Compiler
from tilery.measure.place import not_run, place
from tilery.measure.recorder import Recorder, kept_code, kind_of
from tilery.measure.result import Row, is_ours
from tilery.measure.store import Store
from tilery.workbench import first_calls, isolate
from tilery.workbench.bench import Unit, units

Say = Callable[[str], None]
T = TypeVar("T")


@dataclass(frozen=True)
class Choice:
    """What to bench of one op."""

    op: Op
    kernels: list[str]
    peers: list[str]
    cases: list[Case] | None  # None: the op's own
    named: bool = False  # the kernels were asked for by name

    def case(self, name: str) -> Case:
        known = [*(self.cases or []), *(case for cases in self.op.cases.values() for case in cases)]
        return next(case for case in known if str(case) == name)


@dataclass(frozen=True)
class How:
    """How a bench measures, and for how long."""

    depth: timing.Depth
    cold: bool = True
    shapes: str | None = None  # the set that all cases are of
    defaults: bool = False  # each case has the kernel and config that an untuned call gets
    minutes: float | None = None  # no case begins after them
    known: Collection[tuple[str, str]] = ()  # ops and cases that are left out, because they are in the user's file


def run(choices: list[Choice], store: Store, how: How, say: Say, count: Callable[[int], None]) -> Recorder:
    """`count` is called after every case, with the number of cases there are."""
    left_out = {name: why for choice in choices for name, why in _left_out(choice).items()}
    work = []
    for c in choices:
        kernels, others = ([arm for arm in arms if (c.op.name, arm) not in left_out] for arms in (c.kernels, c.peers))
        work += units(c.op, kernels, others, c.cases, how.depth, how.cold, how.defaults)
    work = [unit for unit in work if (unit.op, str(unit.case)) not in how.known]
    devices = sorted({torch.device(unit.device) for unit in work}, key=str)
    recorder = Recorder(store, devices, str(how.depth), say, {"shapes": how.shapes} if how.shapes else None)
    with recorder.running():
        for (op, arm), why in left_out.items():
            recorder.add(Row(op, arm, "", "skipped", why))
        first_calls.make(work, say)
        _measure(work, recorder, how.minutes, say, count)
        with settings.override(tuned=not how.defaults):
            _describe_timed(choices, recorder, say)
        if not how.defaults:
            _compile_the_rest(choices, recorder, say)
    return recorder


def _measure(
    work: list[Unit], recorder: Recorder, minutes: float | None, say: Say, count: Callable[[int], None]
) -> None:
    with contextlib.closing(isolate.measured(work, lambda arm, what: say(what))) as measured:
        for done, rows in enumerate(measured, 1):
            for row in rows:
                recorder.add(row)
            count(len(work))
            if minutes is not None and recorder.minutes >= minutes:
                why = f"not begun: the {minutes:g} minutes of --minutes were over"
                recorder.add(*(Row(unit.op, "(all)", str(unit.case), "skipped", why) for unit in work[done:]))
                return


def _left_out(choice: Choice) -> dict[tuple[str, str], str]:
    """Peers that are not here, and kernels for the CPU where there is a GPU: each is a row that says so."""
    found = {name: why for name in choice.peers if (why := peers.missing(name.removeprefix("baseline:")))}
    if torch.cuda.is_available() and not choice.named:
        on_cpu = [k for k in choice.kernels if place(choice.op, k).device == torch.device("cpu")]
        found |= {k: f"runs on the CPU, and there is a GPU here; --backend {k} times it" for k in on_cpu}
    return {(choice.op.name, name): why for name, why in found.items()}


def _describe_timed(choices: list[Choice], recorder: Recorder, say: Say) -> None:
    """Registers, spills and code of each kernel and config that was timed, from the first row that has it."""
    by_op = {choice.op.name: choice for choice in choices}
    timed = {kind_of(row): row for row in reversed(recorder.rows) if row.samples and is_ours(row.kernel)}

    def compiled(compiler: Compiler, row: Row) -> tuple[Artifact, dict[str, str]] | None:
        say(f"compiling {row.op} {row.kernel}")
        op, where = REGISTRY[row.op], place(REGISTRY[row.op], row.kernel).device
        specs = specs_for(op, by_op[row.op].case(row.case), str(where))
        try:
            config = op.plan(specs, row.kernel).config
            made = compiler.compile(op.name, row.kernel, specs, device.arch(torch.device(str(where))), config)
            return made, kept_code(made)
        except CompileFailed:  # it ran, so what fails is only to look at it: the row stays without
            return None

    for row, made in zip(timed.values(), _in_parallel(compiled, timed.values())):
        if made is not None:
            recorder.describe(row, *made)


def _compile_the_rest(choices: list[Choice], recorder: Recorder, say: Say) -> None:
    """Kernels that cannot be timed here: one case each."""
    there = {
        (choice.op.name, kernel): (choice, found)
        for choice in choices
        for kernel in choice.kernels
        if (found := place(choice.op, kernel)).device is None or found.interpreted
    }

    def compiled(compiler: Compiler, name: tuple[str, str]) -> Row:
        choice, kernel = there[name][0], name[1]
        say(f"compiling {choice.op.name} {kernel}")
        cases = choice.cases or choice.op.cases["bench"]  # a set may have none for this op
        return not_run(choice.op, kernel, cases[len(cases) // 2], compiler, recorder.keep_code)

    for row in _in_parallel(compiled, there):
        recorder.add(row)


def _in_parallel(work: Callable[[Compiler, Any], T], items: Iterable[Any]) -> Iterator[T]:
    """The results in order; each worker has a compiling child of its own."""
    count = max(1, min(8, device.cores()))
    free: SimpleQueue[Compiler] = SimpleQueue()
    compilers = [Compiler() for _ in range(count)]
    for compiler in compilers:
        free.put(compiler)

    def one(item: Any) -> T:
        compiler = free.get()
        try:
            return work(compiler, item)
        finally:
            free.put(compiler)

    with ThreadPoolExecutor(count) as pool:
        try:
            yield from pool.map(one, items)
        finally:  # before the pool waits for its threads: on Ctrl-C they wait for compilers
            for compiler in compilers:
                compiler.close()
