"""`tilery bench`: checked first, then timed in turns with what a user would run instead."""

import io
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from tilery.base import files
from tilery.base.errors import BadInput
from tilery.cli import common

if TYPE_CHECKING:
    from tilery.core.op import Op
    from tilery.measure.result import Row

_COLUMNS = (
    "op",
    "case",
    "kernel",
    "ms",
    "± 95 %",
    "rate",
    "roof",
    "× torch",
    "inputs",
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
    n: common.Width = None,
    k: common.Depth = None,
    m: common.Rows = None,
    peers: common.Peers = None,
    screen: Annotated[bool, typer.Option("--screen", help="Six rounds of 2 ms turns: to find, not to claim.")] = False,
    warm: Annotated[bool, typer.Option("--warm", help="Inputs from the caches; from memory if not.")] = False,
    rounds: Annotated[int | None, typer.Option(min=6, help="Turns there and back of every arm.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the rows to this file too.")] = None,
    csv_form: Annotated[
        str | None,
        typer.Option(help="rows: one an arm; pairs: one a product and peer (the form of --N and --K)."),
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="Write the table as a picture.")] = None,
    json: common.Json = False,
) -> None:  # fmt: skip
    """Check, then time kernels in turns with what a user could run instead; what cannot run here is compiled."""
    from tilery.measure import timing
    from tilery.measure.place import chosen_kernels, require_known
    from tilery.measure.result import is_ours
    from tilery.measure.store import Store
    from tilery.workbench.run import Choice, run

    common.require_writable(csv)
    common.require_writable(svg)
    chosen, given, shapes = common.chosen_ops(ops), common.product(n, k, m), common.settled_shapes(shapes)
    require_known(chosen, backend, "--backend")
    against = common.chosen_peers(chosen, peers)
    choices = [
        Choice(
            op,
            list(chosen_kernels(op, backend)),
            against[op.name],
            common.chosen_cases(op, case, shapes, given),
            bool(backend),
        )
        for op in chosen
    ]
    write_csv = _csv_writer(csv_form or ("pairs" if given else "rows"), chosen)
    depth = timing.SCREEN if screen else timing.FULL
    depth = replace(depth, rounds=rounds or depth.rounds)
    with common.progress() as (say, count):
        done = run(choices, Store(), depth, not warm, say, count, shapes)
    if csv:
        write_csv(done.rows, csv)
    table = _table(done.rows, common.shapes_title(shapes))
    if svg:
        _draw(table, svg)
    if json:
        common.print_json(done.rows, run=done.id, **common.shapes_said(shapes))
    else:
        common.console().print(table)
        print(f"kept as run {done.id}", file=sys.stderr)
    raise typer.Exit(1 if any(row.status == "fail" and is_ours(row.kernel) for row in done.rows) else 0)


def _csv_writer(form: str, ops: "list[Op]") -> "Callable[[list[Row], Path], None]":
    from tilery.measure import result
    from tilery.pages import pairs
    from tilery.workbench.shapes import require_product

    writers = {"rows": result.write_csv, "pairs": pairs.write_csv}
    if form not in writers:
        raise BadInput(f"--csv-form must be one of {', '.join(writers)}, got {form!r}")
    if form == "pairs":
        for op in ops:
            require_product(op, "--csv-form pairs is")
    return writers[form]


def _table(rows: "list[Row]", more: str) -> Table:
    from tilery.measure.result import machine

    here = machine()
    where = here["gpu"] or here["cpu"]
    title = f"tilery bench on {where}, torch {here['torch']}; inputs from memory unless it says warm"
    return common.table(title + more, _COLUMNS, map(_line, rows), _RIGHT)


def _draw(table: Table, svg: Path) -> None:
    console = Console(record=True, width=150, file=io.StringIO())
    console.print(table)
    picture = console.export_svg(title="tilery bench")
    files.write(svg, re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL))  # no fonts from the network


def _line(row: "Row") -> tuple[str, ...]:
    return (
        row.op, row.case, row.kernel, *_measures(row), "" if row.inputs == "cold" else row.inputs,
        common.number(row.error, ".0e"), common.number(row.registers), 
        common.number(row.spills), common.number(row.shared),
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
