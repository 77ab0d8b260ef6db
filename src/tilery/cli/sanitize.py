"""`tilery sanitize`: kernels under NVIDIA's compute-sanitizer."""

import json as json_module
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from tilery.base.errors import BadInput
from tilery.cli import common
from tilery.cli.tables import Paragraph, Table, fact, figure, key

if TYPE_CHECKING:
    from tilery.workbench.sanitize import Row

Tools = Annotated[str, typer.Option("--tool", help="memcheck, racecheck, initcheck, synccheck, or several: a,b.")]
Cases = Annotated[str | None, typer.Option("--cases", help="How many per kernel, or all; a covering set if not given.")]
Jobs = Annotated[
    int | None, typer.Option("--jobs", "-j", min=1, help="Processes at a time; half the cores, 8 at most.")
]
Timeout = Annotated[float, typer.Option("--timeout", min=1, help="Seconds that one process may take.")]

_STYLE = {"clean": "green", "finding": "bold red", "tool": "yellow", "skipped": "dim", "failed": "bold red"}


def sanitize(
    ops: common.Ops = None,
    backend: common.Backends = None,
    tool: Tools = "memcheck",
    cases: Cases = None,
    jobs: Jobs = None,
    timeout: Timeout = 600.0,
    json: common.Json = False,
) -> None:
    """Run kernels on the GPU under compute-sanitizer: overruns, races, uninitialised reads, wrong barriers."""
    from tilery.measure.place import require_known
    from tilery.measure.result import SCHEMA, machine
    from tilery.workbench import sanitize as workbench

    chosen = common.chosen_ops(ops)
    require_known(chosen, backend, "--backend")
    workers = jobs or min(8, max(1, (os.cpu_count() or 2) // 2))
    asked = workbench.Asked(_tools(tool), backend, _number_of_cases(cases), workers, timeout)
    found: list[Row] = []
    examined, interrupted = "nothing was examined", False
    with common.progress() as (say, count):

        def progress(done: int, total: int) -> None:
            nonlocal examined
            examined = f"examined {done} of {total} batches of kernels"
            say(examined)
            count(total)

        try:
            found += workbench.rows(chosen, asked, progress)  # row by row: an interrupt leaves those that came
        except KeyboardInterrupt:
            interrupted = True
    found.sort(key=lambda row: (row.op, row.kernel, workbench.TOOLS.index(row.tool)))
    verdict = workbench.verdict(found)
    if json:
        rows = [asdict(row) for row in found]
        print(json_module.dumps({"schema": SCHEMA, "machine": machine(), "rows": rows, "verdict": verdict}))
    else:
        _print(found, verdict)
    if interrupted:
        raise KeyboardInterrupt(f"{examined}, whose rows are printed")
    raise typer.Exit(1 if workbench.bad(found) else 0)


def _tools(text: str) -> tuple[str, ...]:
    from tilery.workbench.sanitize.cases import TOOLS

    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in TOOLS:
            raise BadInput(f"--tool must be some of {', '.join(TOOLS)}, got {name!r}")
    return tuple(tool for tool in TOOLS if tool in names)


def _number_of_cases(text: str | None) -> int | str | None:
    from tilery.workbench.sanitize.cases import ALL

    if text is None or text == ALL:
        return text
    if not text.isdecimal() or not int(text):
        raise BadInput(f"--cases must be a number from 1 on, or all, got {text!r}")
    return int(text)


def _print(rows: "list[Row]", verdict: str) -> None:
    """A line per kernel and tool, then what is not clean, in full."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.op, row.kernel, row.tool), []).append(row)
    lines = []
    for (op, kernel, tool), group in groups.items():
        cases = len({row.case for row in group if row.case})
        worst = next(s for s in ("finding", "failed", "tool", "clean", "skipped") if any(r.status == s for r in group))
        styled = f"[{_STYLE[worst]}]{worst}[/]"
        lines.append((op, kernel, tool, str(cases or ""), styled))
    columns = (key("op"), key("kernel"), fact("tool"), figure("cases"), key("result"))
    common.say(Table("Kernels examined", columns, lines))
    for row in rows:
        if row.status != "clean":
            _print_in_full(row)
    common.say(verdict)


def _print_in_full(row: "Row") -> None:
    named = " ".join(part for part in (row.op, row.kernel, row.tool, row.case) if part)
    times = f" ({row.count} times)" if row.count > 1 else ""
    paragraphs = [f"{row.status}: {named}", row.what + times]
    paragraphs += [f"at {row.where}"] if row.where else []
    paragraphs += [f"the tool's own: {row.reason}"] if row.reason else []
    common.say(*(Paragraph(text, indent=2 if i else 0, hang=2) for i, text in enumerate(paragraphs)))
