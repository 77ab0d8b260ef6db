"""Runs kernels under NVIDIA's compute-sanitizer, case by case, and says which are clean.

A kernel's cases run in one child process. Where that reports anything, each case runs again in a process of its own, so
that a finding belongs to its case whatever the order in which the tool prints.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tilery.backends import toolkit
from tilery.errors import ToolMissing
from tilery.op import Op
from tilery.spec import Case
from tilery.workbench import sanitize_report
from tilery.workbench.place import chosen_kernels, place
from tilery.workbench.sanitize_cases import TOOLS, chosen_cases
from tilery.workbench.sanitize_report import Report, known_reason

_FOUND = 86  # the exit code we ask for where the tool found something
_OPTIONS = {"memcheck": ("--report-api-errors", "no", "--leak-check", "no", "--padding", "512")}


@dataclass(frozen=True)
class Asked:
    tools: tuple[str, ...] = ("memcheck",)
    backends: Sequence[str] | None = None
    cases: int | str | None = None  # the first so many of a covering set, "all", or None for the covering set
    jobs: int = 4  # children at a time
    timeout_s: float = 600.0  # of one child


@dataclass(frozen=True)
class Batch:
    """What one child runs."""

    op: str
    kernel: str
    tool: str
    cases: tuple[Case, ...]


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
    done: dict[int, dict[str, str]] = field(default_factory=dict)  # case -> its last line


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
    watched = [sys.executable, "-m", "tilery.workbench.sanitize_child", str(folder / "request"), str(folder / "done")]
    return [str(program), *(word for pair in options.items() for word in pair), *_OPTIONS.get(batch.tool, ()), *watched]


def environment() -> dict[str, str]:
    """Of the child: every tensor is an allocation of its own, so that an overrun is seen."""
    env = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "TILERY_EXPLAIN")}
    source = str(Path(__file__).parents[2])  # so that a checkout works uninstalled
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
        request = {"op": batch.op, "kernel": batch.kernel, "cases": [case.params for case in batch.cases]}
        (folder / "request").write_text(json.dumps(request), encoding="utf-8")
        with (folder / "said").open("w+b") as said:
            process = subprocess.Popen(
                command(program, batch, folder, asked), stdin=subprocess.DEVNULL, stdout=said, stderr=said,
                env=environment(), start_new_session=True,
            )  # fmt: skip
            code: int | None = None
            _alive.add(process)
            try:
                code = process.wait(asked.timeout_s)
            except subprocess.TimeoutExpired:
                pass
            finally:
                _end(process)
        log, said_text = (_text(folder / part) for part in ("log", "said"))
        lines = [json.loads(line) for line in _text(folder / "done").splitlines() if line.endswith("}")]
        done = {line["case"]: line for line in lines}
        return Outcome(sanitize_report.parse(f"{log}\n{said_text}"), code, said_text.strip()[-2000:], done)


_alive: set["subprocess.Popen[bytes]"] = set()


def _end(process: "subprocess.Popen[bytes]") -> None:
    """The tool and what it watches, if they are still there."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    _alive.discard(process)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


# Rows


def judged(batch: Batch, outcome: Outcome) -> list[Row] | None:
    """A row or more per case; None where a finding or a failure may be any of several cases'."""
    report, rows = outcome.report, []
    ran = [i for i, line in outcome.done.items() if line["status"] == "ran"]
    if report.not_attached and ran:
        raise ToolMissing(
            f"compute-sanitizer does not see the kernels on this machine, it says: {report.not_attached}. "
            "Virtual machines and containers may forbid it; run it where it may attach to a GPU"
        )
    finished = all(outcome.done.get(i, {}).get("status") in ("ran", "refused") for i in range(len(batch.cases)))
    good = finished and report.errors is not None and not report.findings and outcome.code != _FOUND
    if not good and len(batch.cases) > 1:
        return None
    for index, case in enumerate(batch.cases):
        line = outcome.done.get(index, {})
        if not good:
            rows += _bad(batch, outcome, str(case), line)
        elif line["status"] == "refused":
            rows.append(Row(batch.op, batch.kernel, str(case), batch.tool, "skipped", line["reason"]))
        else:
            rows.append(Row(batch.op, batch.kernel, str(case), batch.tool, "clean"))
    return rows


def _bad(batch: Batch, outcome: Outcome, case: str, line: dict[str, str]) -> list[Row]:
    named = (batch.op, batch.kernel, case, batch.tool)
    if rows := findings(batch, outcome.report, case):
        return rows
    if outcome.code is None:
        return [Row(*named, "failed", "it took longer than --timeout allows")]
    if line.get("status") == "failed":
        return [Row(*named, "failed", line["reason"])]
    if outcome.code == _FOUND:
        return [Row(*named, "finding", f"the tool found something that it does not name: {outcome.said}")]
    return [Row(*named, "failed", f"its process ended with code {outcome.code} before its end: {outcome.said}")]


def findings(batch: Batch, report: Report, case: str) -> list[Row]:
    rows = []
    for found in report.findings:
        reason = known_reason(batch.tool, batch.op, batch.kernel, found)
        status = "finding" if reason is None else "tool"
        named = (batch.op, batch.kernel, case, batch.tool)
        rows.append(Row(*named, status, found.what, found.where or found.function, reason or "", found.count))
    return rows


def examined(program: Path, batch: Batch, asked: Asked) -> list[Row]:
    """The rows of a batch, where needed from a child for each case."""
    outcome = watched(program, batch, asked)
    if (rows := judged(batch, outcome)) is not None:
        return rows
    rows = []
    for case in batch.cases:
        alone = Batch(batch.op, batch.kernel, batch.tool, (case,))
        rows += judged(alone, watched(program, alone, asked)) or []
    if all(row.status in ("clean", "skipped") for row in rows):  # it took several: no finding is dropped
        together = f"({len(batch.cases)} cases in one process)"
        rows += findings(batch, outcome.report, together) or [
            Row(
                batch.op, batch.kernel, together, batch.tool, "failed", f"one by one they run; together: {outcome.said}"
            )
        ]
    return rows


def batches(ops: Sequence[Op], asked: Asked) -> tuple[list[Batch], list[Row]]:
    """What is to run, tool by tool and most cases first; and rows for what cannot run here."""
    made: list[Batch] = []
    skipped: list[Row] = []
    for op in ops:
        for kernel in chosen_kernels(op, asked.backends):
            where = place(op, kernel)
            if where.device is None or where.device.type != "cuda":
                on_cpu = where.device is not None
                if not on_cpu or asked.backends:
                    why = "it runs on the CPU" if on_cpu else where.reason
                    skipped += [Row(op.name, kernel, "", tool, "skipped", why) for tool in asked.tools]
                continue
            for tool in asked.tools:
                if cases := chosen_cases(op, kernel, tool, asked.cases):
                    made.append(Batch(op.name, kernel, tool, tuple(cases)))
                else:
                    skipped.append(Row(op.name, kernel, "", tool, "skipped", "it takes none of the op's cases"))
    made.sort(key=lambda batch: (TOOLS.index(batch.tool), -len(batch.cases)))
    return made, skipped


def rows(ops: Sequence[Op], asked: Asked, progress: Callable[[int, int], None] = lambda *_: None) -> Iterator[Row]:
    """Every row, batch by batch as they end; `progress` is told how many of how many batches are done."""
    require_gpu()
    program = sanitizer()
    todo, skipped = batches(ops, asked)
    yield from skipped
    with ThreadPoolExecutor(asked.jobs) as pool:
        running = [pool.submit(examined, program, batch, asked) for batch in todo]
        try:
            for count, future in enumerate(as_completed(running), 1):
                yield from future.result()
                progress(count, len(todo))
        finally:  # after an error or an interrupt nothing goes on behind the user's back
            pool.shutdown(wait=False, cancel_futures=True)
            for process in tuple(_alive):
                _end(process)


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
