"""Runs kernels under NVIDIA's compute-sanitizer and says which are clean.

A child process launches several kernels on all their cases, since starting one takes longer than most launches. Where
the tool reports anything, each kernel runs again in a process of its own, and then each case, so that a finding belongs
to its case whatever the order in which the tool prints.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from tilery.base.errors import ToolMissing
from tilery.base.spec import Case
from tilery.core.op import Op
from tilery.hardware import toolkit
from tilery.measure.place import place, timed_kernels
from tilery.workbench.sanitize import report as sanitize_report
from tilery.workbench.sanitize.cases import TOOLS, chosen_cases
from tilery.workbench.sanitize.report import Report, expects_findings, known_reason, unfit_reason

_KERNELS = 4  # of one child: more would keep the last child busy alone
_FOUND = 86  # the exit code we ask for where the tool found something
_OPTIONS = {"memcheck": ("--report-api-errors", "no", "--leak-check", "no", "--padding", "512")}


@dataclass(frozen=True)
class Asked:
    tools: tuple[str, ...] = ("memcheck",)
    backends: Sequence[str] | None = None
    cases: int | str | None = None  # the first so many of a covering set, "all", or None for the covering set
    jobs: int = 4  # children at a time
    timeout_s: float = 600.0  # of one child


class Run(NamedTuple):
    """One launch: a kernel on a case."""

    op: str
    kernel: str
    case: Case


@dataclass(frozen=True)
class Batch:
    """What one child runs under one tool."""

    tool: str
    runs: tuple[Run, ...]

    @property
    def kernels(self) -> list[tuple[str, str]]:
        """(op, kernel) pairs, each once."""
        return list(dict.fromkeys((run.op, run.kernel) for run in self.runs))

    def split(self) -> "list[Batch]":
        """A batch for each kernel, or where there is only one, for each case."""
        if len(kernels := self.kernels) == 1:
            return [Batch(self.tool, (run,)) for run in self.runs]
        groups = [tuple(run for run in self.runs if (run.op, run.kernel) == each) for each in kernels]
        return [Batch(self.tool, group) for group in groups]


@dataclass
class Row:
    op: str
    kernel: str
    case: str
    tool: str
    status: str  # clean, finding, tool (its own finding), skipped or failed
    what: str = ""  # the finding, or why it was skipped or failed
    where: str = ""  # file:line
    reason: str = ""  # why a finding is the tool's own
    count: int = 1  # times that it was printed


@dataclass(frozen=True)
class Outcome:
    """What came of one child."""

    report: Report
    code: int | None  # None: it took too long
    said: str  # the end of what it printed
    done: dict[int, dict[str, str]] = field(default_factory=dict)  # number of a run -> its last line


def sanitizer() -> Path:
    """The program; raises ToolMissing."""
    try:
        return toolkit.find("compute-sanitizer")
    except ToolMissing:
        usual = Path("/usr/local/cuda/bin/compute-sanitizer")
        if usual.is_file():
            return usual
        raise ToolMissing(
            "compute-sanitizer is not here: it comes with a CUDA toolkit (package cuda-sanitizer); put the toolkit's "
            "bin folder on PATH or set CUDA_HOME"
        ) from None


def require_gpu() -> None:
    if not torch.cuda.is_available():
        raise ToolMissing("tilery sanitize launches kernels, so it needs an NVIDIA GPU that torch sees; there is none")


# Children


def command(program: Path, batch: Batch, folder: Path, asked: Asked) -> list[str]:
    """compute-sanitizer and what it watches."""
    options = {
        "--tool": batch.tool,
        "--log-file": str(folder / "log"),
        "--error-exitcode": str(_FOUND),
        "--print-limit": "200",
        "--target-processes": "application-only",  # not the compilers that it starts
        "--destroy-on-device-error": "kernel",  # the next case runs all the same
        "--show-backtrace": "device",
        "--strip-paths": "no",
        "--launch-timeout": "120",
        "--max-connections": str(10 + asked.jobs),
    }
    watched = [sys.executable, "-m", "tilery.workbench.sanitize.child", str(folder / "request"), str(folder / "done")]
    return [str(program), *(word for pair in options.items() for word in pair), *_OPTIONS.get(batch.tool, ()), *watched]


def environment() -> dict[str, str]:
    """The child's environment: every tensor is an allocation of its own, so that an overrun is seen."""
    env = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "TILERY_EXPLAIN")}
    source = str(Path(__file__).parents[3])  # so that a checkout works uninstalled
    env["PYTHONPATH"] = os.pathsep.join([source, *filter(None, [env.get("PYTHONPATH")])])
    return env | {
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "TILERY_CHECK_INDICES": "0",  # cases with bad indices are to reach the kernels
        "TRITON_DISABLE_LINE_INFO": "0",
    }


def watched(program: Path, batch: Batch, asked: Asked) -> Outcome:
    """Run one child to its end, or until it has taken too long."""
    with tempfile.TemporaryDirectory(prefix="tilery-sanitize-") as name:
        folder = Path(name)
        request = [{"op": run.op, "kernel": run.kernel, "case": run.case.params} for run in batch.runs]
        (folder / "request").write_text(json.dumps(request), encoding="utf-8")
        with (folder / "said").open("w+b") as said:
            process = subprocess.Popen(
                command(program, batch, folder, asked), stdin=subprocess.DEVNULL, stdout=said, stderr=said,
                env=environment(), start_new_session=True,
            )  # fmt: skip
            code: int | None = None
            _alive.add(process)
            if _stopped.is_set():
                _end(process)
            try:
                code = process.wait(asked.timeout_s)
            except subprocess.TimeoutExpired:
                pass
            finally:
                _end(process)
        log, said_text = (_text(folder / part) for part in ("log", "said"))
        lines = [json.loads(line) for line in _text(folder / "done").splitlines() if line.endswith("}")]
        done = {line["run"]: line for line in lines}
        return Outcome(sanitize_report.parse(f"{log}\n{said_text}"), code, said_text.strip()[-2000:], done)


_alive: set["subprocess.Popen[bytes]"] = set()
_stopped = threading.Event()  # no child is started any more


def _end(process: "subprocess.Popen[bytes]") -> None:
    """The tool and what it watches, if they are still there."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    _alive.discard(process)


def kill_all() -> None:
    for process in tuple(_alive):
        _end(process)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


# Rows


def judged(batch: Batch, outcome: Outcome) -> list[Row] | None:
    """A row or more per case; None where a finding or a failure may be any of several kernels' or cases'."""
    report = outcome.report
    ran = [i for i, line in outcome.done.items() if line["status"] == "ran"]
    if report.not_attached and ran:
        raise ToolMissing(
            f"compute-sanitizer does not see the kernels on this machine, it says: {report.not_attached}. "
            "Virtual machines and containers may forbid it; run it where it may attach to a GPU"
        )
    complete = all(outcome.done.get(i, {}).get("status") in ("ran", "refused") for i in range(len(batch.runs)))
    complete = complete and report.errors is not None
    if complete and not report.findings and outcome.code != _FOUND:
        return [_row(batch, run, outcome.done[i]) for i, run in enumerate(batch.runs)]
    if complete and len(batch.runs) > 1 and len(batch.kernels) == 1:  # the tool's own findings need not be any case's
        found = findings(batch, report)
        if found and all(row.status == "tool" for row in found):
            return [_row(batch, run, outcome.done[i]) for i, run in enumerate(batch.runs)] + found
    return _bad(batch, outcome) if len(batch.runs) == 1 else None


def _row(batch: Batch, run: Run, line: dict[str, str]) -> Row:
    """The row of a launch that nothing was found in."""
    status, why = ("skipped", line["reason"]) if line["status"] == "refused" else ("clean", "")
    return Row(run.op, run.kernel, str(run.case), batch.tool, status, why)


def _bad(batch: Batch, outcome: Outcome) -> list[Row]:
    """The rows of the one launch of a batch, which is not clean."""
    (run,) = batch.runs
    line = outcome.done.get(0, {})
    if rows := findings(batch, outcome.report):
        return rows
    status, why = "failed", f"its process ended with code {outcome.code} before its end: {outcome.said}"
    if outcome.code is None:
        why = "it took longer than --timeout allows"
    elif line.get("status") == "failed":
        why = line["reason"]
    elif outcome.code == _FOUND:
        status, why = "finding", f"the tool found something that it does not name: {outcome.said}"
    return [Row(run.op, run.kernel, str(run.case), batch.tool, status, why)]


def findings(batch: Batch, report: Report) -> list[Row]:
    """The findings of a batch, named after its kernel and case if it has only one."""
    rows = []
    op, kernel, case = _label(batch)
    for found in report.findings:
        reason = known_reason(batch.tool, op, kernel, found)
        status = "finding" if reason is None else "tool"
        where = found.where or found.function
        rows.append(Row(op, kernel, case, batch.tool, status, found.what, where, reason or "", found.count))
    return rows


def _label(batch: Batch) -> tuple[str, str, str]:
    """(op, kernel, case) of a batch; of several, how many."""
    count = len(batch.runs)
    op, kernel = batch.kernels[0] if len(batch.kernels) == 1 else (f"({len(batch.kernels)} kernels)", "")
    return op, kernel, str(batch.runs[0].case) if count == 1 else f"({count} cases in one process)"


def examined(program: Path, batch: Batch, asked: Asked) -> list[Row]:
    """The rows of a batch, where needed from a child for each kernel or case; none once all is stopped."""
    if _stopped.is_set():
        return []
    outcome = watched(program, batch, asked)
    if _stopped.is_set():
        return []
    if (rows := judged(batch, outcome)) is not None:
        return rows
    rows = [row for part in batch.split() for row in examined(program, part, asked)]
    if all(row.status in ("clean", "skipped") for row in rows):  # it took several: no finding is dropped
        why = f"one by one they run; together: {outcome.said}"
        rows += findings(batch, outcome.report) or [Row(*_label(batch), batch.tool, "failed", why)]
    return rows


def batches(ops: Sequence[Op], asked: Asked) -> tuple[list[Batch], list[Row]]:
    """What is to run, tool by tool and most cases first; and rows for what cannot run here, or not under that tool."""
    found: dict[str, list[list[Run]]] = {tool: [] for tool in asked.tools}  # a list of runs per kernel
    others: list[Row] = []
    for op in ops:
        for kernel in timed_kernels(op, asked.backends):  # a library's code is not ours to mend
            where = place(op, kernel)
            if where.device is None or where.device.type != "cuda":
                on_cpu = where.device is not None
                if not on_cpu or asked.backends:
                    why = "it runs on the CPU" if on_cpu else where.reason
                    others += [Row(op.name, kernel, "", tool, "skipped", why) for tool in asked.tools]
                continue
            for tool in asked.tools:
                if reason := unfit_reason(tool, op.name, kernel):
                    others.append(Row(op.name, kernel, "", tool, "tool", "it was not run", reason=reason))
                elif cases := chosen_cases(op, kernel, tool, asked.cases):
                    found[tool].append([Run(op.name, kernel, case) for case in cases])
                else:
                    others.append(Row(op.name, kernel, "", tool, "skipped", "it takes none of the op's cases"))
    made = [batch for tool in TOOLS if tool in found for batch in _together(tool, found[tool])]
    return made, others


def _together(tool: str, kernels: list[list[Run]]) -> list[Batch]:
    """Batches of a few kernels each; alone what the tool will report on though it is right."""
    alone = [runs for runs in kernels if expects_findings(tool, runs[0].op, runs[0].kernel)]
    others = sorted((runs for runs in kernels if runs not in alone), key=len)
    count = -(-len(others) // _KERNELS)
    groups = alone + [[run for runs in others[i::count] for run in runs] for i in range(count)]
    return [Batch(tool, tuple(runs)) for runs in sorted(groups, key=len, reverse=True)]


def rows(ops: Sequence[Op], asked: Asked, progress: Callable[[int, int], None] = lambda *_: None) -> Iterator[Row]:
    """Every row, batch by batch as they end; `progress` is told how many of how many batches are done."""
    require_gpu()
    program = sanitizer()
    waiting, others = batches(ops, asked)
    yield from others
    pool = ThreadPoolExecutor(asked.jobs)
    try:
        running = [pool.submit(examined, program, batch, asked) for batch in waiting]
        for count, future in enumerate(as_completed(running), 1):
            yield from future.result()
            progress(count, len(waiting))
    finally:  # after an error or an interrupt nothing goes on behind the user's back
        _stopped.set()
        kill_all()
        pool.shutdown(cancel_futures=True)
        _stopped.clear()


def bad(found: Sequence[Row]) -> list[Row]:
    """What makes the command fail: a finding that is ours, or a case that could not be examined."""
    return [row for row in found if row.status in ("finding", "failed")]


def verdict(found: Sequence[Row]) -> str:
    """One sentence on all rows."""
    count = {s: sum(row.status == s for row in found) for s in ("clean", "finding", "tool", "skipped", "failed")}
    kernels = len({(row.op, row.kernel) for row in found if row.status != "skipped"})
    where = len({(row.op, row.kernel) for row in found if row.status == "finding"})
    parts = [f"{count['clean']} cases of {kernels} kernels are clean"]
    if count["finding"]:
        parts.append(f"{count['finding']} findings in {where} kernels")
    if count["tool"]:
        parts.append(f"{count['tool']} reports are the tool's own")
    if count["failed"]:
        parts.append(f"{count['failed']} cases could not be examined")
    if count["skipped"]:
        parts.append(f"{count['skipped']} were skipped")
    return "; ".join(parts) + "."
