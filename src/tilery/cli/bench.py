"""`tilery bench`: checked first, then timed in turns with what a user would run instead."""

import io
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from tilery.cli import common

if TYPE_CHECKING:
    from tilery.workbench.result import Row

_COLUMNS = (
    "op",
    "case",
    "kernel",
    "ms",
    "± 95 %",
    "rate",
    "roof",
    "× torch",
    "error",
    "regs",
    "spills",
    "shared",
    "status",
    "reason",
)
_RIGHT = ("ms", "± 95 %", "rate", "roof", "× torch", "error", "regs", "spills", "shared")


def bench(
    ops: common.Ops = None,
    backend: common.Backends = None,
    case: common.CaseText = None,
    shapes: common.Shapes = None,
    rounds: Annotated[int, typer.Option(min=6, help="Every arm is timed once a round.")] = 20,
    csv: Annotated[Path | None, typer.Option(help="Write the rows to this file too.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write the table as a picture.")] = None,
    json: common.Json = False,
) -> None:
    """Check, then time kernels against torch in one interleaved run; what cannot run here is compiled."""
    from tilery.workbench import bench as workbench
    from tilery.workbench.compile import Compiler
    from tilery.workbench.result import write_csv
    from tilery.workbench.store import Store, command_line

    common.require_writable(csv)
    common.require_writable(svg)
    chosen = common.chosen_ops(ops)
    common.require_known(chosen, backend)
    rows: list[Row] = []
    store = Store()
    run = store.start(command_line())
    with Compiler() as compiler, common.progress(len(chosen)) as (say, count):
        for op in chosen:
            given = common.chosen_cases(op, case, shapes)
            for row in workbench.bench(op, common.chosen_kernels(op, backend), given, compiler, rounds, say):
                store.add(run, row)  # at once: what was measured outlives a Ctrl-C
                rows.append(row)
            count()
    store.finish(run)
    if csv:
        write_csv(rows, csv)
    table = _table(rows)
    if svg:
        _draw(table, svg)
    if json:
        common.print_json(rows, run=run)
    else:
        common.console().print(table)
        print(f"kept as run {run}", file=sys.stderr)
    raise typer.Exit(1 if any(row.status == "fail" for row in rows) else 0)


def _table(rows: "list[Row]") -> Table:
    from tilery.workbench.result import machine

    here = machine()
    title = f"tilery bench on {here['gpu'] or here['cpu']}, torch {here['torch']}"
    return common.table(title, _COLUMNS, map(_line, rows), _RIGHT)


def _draw(table: Table, svg: Path) -> None:
    console = Console(record=True, width=150, file=io.StringIO())
    console.print(table)
    picture = console.export_svg(title="tilery bench")
    svg.write_text(re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL))  # no fonts from the network


def _line(row: "Row") -> tuple[str, ...]:
    return (
        row.op, row.case, row.kernel, *_measures(row), common.number(row.error, ".0e"),
        common.number(row.registers), common.number(row.spills), common.number(row.shared),
        common.styled(row.status) + (f" {row.arch}" if row.arch else ""),
        common.literal(row.reason) if row.status in ("fail", "refused", "skipped") else "",
    )  # fmt: skip


def _measures(row: "Row") -> tuple[str, ...]:
    """Time, half its interval, rate, share of the roof, ratio; TFLOP/s where arithmetic is the question."""
    if row.ms is None or row.ms_low is None or row.ms_high is None or row.gbps is None or row.tflops is None:
        return ("",) * 5
    rate = f"{row.tflops:.2f} TFLOP/s" if row.tflops * 1e3 > 20 * row.gbps else f"{row.gbps:.1f} GB/s"
    half = (row.ms_high - row.ms_low) / 2
    return f"{row.ms:.4f}", f"{half:.4f}", rate, common.number(row.roof, ".0%"), common.number(row.ratio, ".2f")
