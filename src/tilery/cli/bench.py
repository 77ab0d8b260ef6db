"""`tilery bench`: checked first, then timed in turns with what a user would run instead."""

import io
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console, Group, RenderableType

from tilery.base import files
from tilery.base.errors import BadInput
from tilery.cli import common
from tilery.cli.tables import Paragraph, Table, fact, figure, heading, key

if TYPE_CHECKING:
    from tilery.core.op import Op
    from tilery.measure.result import Row

_COLUMNS = (
    heading("op"), heading("case"), key("kernel"), figure("ms"), figure("± 95 %"), figure("rate", 2),
    figure("roof", 1), figure("× torch"), fact("inputs"), figure("error"), figure("regs", 4), figure("spills", 3),
    figure("shared", 5), fact("status"),
)  # fmt: skip
_COMPILED = (
    heading("op"), heading("case"), key("kernel"), fact("for"), figure("regs"), figure("spills"), figure("shared"),
)  # fmt: skip
_NAMED = 3  # rows that a verdict names


def bench(
    ops: common.Ops = None,
    backend: common.Backends = None,
    case: common.CaseText = None,
    shapes: common.Shapes = None,
    n: common.Width = None,
    k: common.Depth = None,
    m: common.Rows = None,
    peers: common.Peers = None,
    defaults: Annotated[
        bool, typer.Option("--defaults", help="The one kernel and config that an untuned call gets.")
    ] = False,
    screen: common.Screen = False,
    warm: Annotated[bool, typer.Option("--warm", help="Inputs from the caches; from memory if not.")] = False,
    rounds: common.Rounds = None,
    turn_ms: common.TurnMs = None,
    minutes: Annotated[
        float | None, typer.Option(help="Begin no case after so many minutes; what is left out is said.", min=0.0)
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the rows to this file too.")] = None,
    add: Annotated[
        bool, typer.Option("--add", help="Keep what the file of --csv holds, and leave its cases out.")
    ] = False,
    csv_form: Annotated[
        str | None,
        typer.Option(help="rows: one an arm; pairs: one a product and peer (the form of --N and --K)."),
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="Write the table as a picture.")] = None,
    json: common.Json = False,
) -> None:  # fmt: skip
    """Check, then time kernels in turns with what a user could run instead; what cannot run here is compiled."""
    from tilery.measure import csv_file
    from tilery.measure.place import require_known, timed_kernels
    from tilery.measure.result import is_control, is_peer
    from tilery.measure.store import Store
    from tilery.workbench.run import Choice, How, run

    common.require_writable(csv)
    common.require_writable(svg)
    if defaults and backend:
        named = ", ".join(backend)
        raise BadInput(f"--defaults is for the kernel that dispatch takes, got --backend {named} too; leave one out")
    chosen, given, shapes = common.chosen_ops(ops), common.product(n, k, m), common.settled_shapes(shapes)
    require_known(chosen, backend, "--backend")
    against = common.chosen_peers(chosen, peers)
    choices = [
        Choice(
            op,
            list(timed_kernels(op, backend)),
            against[op.name],
            common.chosen_cases(op, case, shapes, given),
            bool(backend),
        )
        for op in chosen
    ]
    form = _csv_form(csv_form or ("pairs" if given else "rows"), chosen)
    before = _added_to(csv, form) if add else []
    how = How(common.depth(screen, rounds, turn_ms), not warm, shapes, defaults, minutes, csv_file.problems(before))
    with common.progress() as (say, count):
        done = run(choices, Store(), how, say, count)
    if csv:
        csv_file.write(csv, form.columns, [*before, *form.lines(done.rows)])
    table = _table(done.rows, common.shapes_title(shapes), defaults)
    if svg:
        _draw(table, svg)
    if json:
        measured = {"protocol": done.protocol, "minutes": round(done.minutes, 2)}
        common.print_json(done.rows, run=done.id, **measured, **common.shapes_said(shapes))
    else:
        common.console().print(table)
        if before and not done.rows:
            common.remark(f"nothing was measured: {csv} has all of these cases")
        common.remark(f"kept as run {done.id}: {done.made_by}")
    kernels = (row for row in done.rows if not is_peer(row.kernel) and not is_control(row.kernel))
    raise typer.Exit(1 if any(row.status == "fail" for row in kernels) else 0)


class _CsvForm(NamedTuple):
    columns: Sequence[str]
    lines: "Callable[[Sequence[Row]], list[dict[str, Any]]]"


def _csv_form(name: str, ops: "list[Op]") -> _CsvForm:
    from tilery.measure import result
    from tilery.pages import pairs
    from tilery.workbench.shapes import require_product

    forms = {"rows": _CsvForm(result.COLUMNS, result.lines), "pairs": _CsvForm(pairs.COLUMNS, pairs.lines)}
    if name not in forms:
        raise BadInput(f"--csv-form must be one of {', '.join(forms)}, got {name!r}")
    if name == "pairs":
        for op in ops:
            require_product(op, "--csv-form pairs is")
    return forms[name]


def _added_to(csv: Path | None, form: _CsvForm) -> list[dict[str, Any]]:
    from tilery.measure import csv_file

    if csv is None:
        raise BadInput("--add goes with --csv FILE, the file that rows are added to; got no --csv")
    return csv_file.measured(csv, form.columns)


def _table(rows: "list[Row]", more: str = "", defaults: bool = False) -> Group:
    """What was timed, what was compiled instead, why others were neither, and what it comes to."""
    from tilery.measure.result import machine

    here = machine()
    where = here["gpu"] or here["cpu"]
    title = f"tilery bench on {where}, torch {here['torch']}; inputs from memory unless it says warm"
    title += more
    timed = [row for row in rows if row.ms is not None or row.status in ("pass", "fail")]
    compiled = [row for row in rows if row.status == "compiled"]
    shown: list[RenderableType] = [Table(title, _COLUMNS, map(_line, timed))] if timed else [Paragraph(title)]
    if compiled:
        shown += ["", Table("Compiled, not run", _COMPILED, map(_compiled_line, compiled))]
    below = [common.reasons(rows)] if any(row.status in ("fail", "refused", "skipped") for row in rows) else []
    said = [Paragraph(text) for text in (*_verdicts(rows, defaults), *_warnings(rows))]
    for part in (below, said):
        shown += ["", *part] if part else []
    return Group(*shown)


def _verdicts(rows: "list[Row]", defaults: bool = False) -> list[str]:
    """In how many rows each kernel, or each op's default, is ahead of torch, and where it is behind."""
    from tilery.measure.result import is_ours

    by_name: dict[str, list[Row]] = {}
    for row in rows:
        if is_ours(row.kernel) and (row.ratio is not None or row.status == "fail"):
            by_name.setdefault(f"{row.op}'s default" if defaults else row.kernel, []).append(row)
    names: dict[str, list[str]] = {}  # by what is true of them
    for name, held in by_name.items():
        if any(row.status == "pass" for row in held):
            names.setdefault(_verdict(held), []).append(name)
    return [f"{', '.join(some)} {'is' if len(some) == 1 else 'are'} {said}." for said, some in names.items()]


def _verdict(rows: "list[Row]") -> str:
    """Ahead or behind is where the whole interval of a ratio says so. The mean has warm rows only if all are."""
    from tilery.pages.summary import geometric_mean

    held = [row for row in rows if row.status == "pass"]
    ahead = sum((row.ratio_low or 0.0) > 1 for row in held)
    behind = sorted((row for row in held if (row.ratio_high or 0.0) < 1), key=lambda row: row.ratio or 0.0)
    level, failed = len(held) - ahead - len(behind), len(rows) - len(held)
    said = f"ahead of torch in {ahead} of {_counted(len(rows), 'row')}"
    said += "".join(f", {what} in {count}" for what, count in (("level", level), ("failed", failed)) if count)
    ratios = [row.ratio for row in held if row.ratio and row.inputs != "warm"]
    ratios = ratios or [row.ratio for row in held if row.ratio]
    if len(ratios) > 1:
        said += f" ({geometric_mean(ratios):.2f} × in geometric mean, {min(ratios):.2f} to {max(ratios):.2f})"
    if not behind:
        return said
    named = ", ".join(f"{row.op} {row.case} {row.ratio:.2f} ×" for row in behind[:_NAMED])
    more = f" and {len(behind) - _NAMED} more" if len(behind) > _NAMED else ""
    return f"{said}; {named}{more} {'is' if len(behind) == 1 else 'are'} behind"


def _warnings(rows: "list[Row]") -> list[str]:
    """That the machine is busy, where torch differs from itself."""
    from tilery.measure.result import CONTROL
    from tilery.pages.summary import CONTROL_OFF

    controls = [row for row in rows if row.kernel == CONTROL and row.ratio is not None]
    off = sorted((abs((row.ratio or 0.0) - 1), row.op, row.case) for row in controls)
    off = [one for one in off if one[0] > CONTROL_OFF]
    if not off:
        return []
    most, op, case = off[-1]
    said = (
        f"Warning: torch timed against itself (control:torch) differs by more than {CONTROL_OFF:.0%} in {len(off)} of "
        f"{_counted(len(controls), 'case')}, by {most:.1%} in {op} {case}. The machine is busy or the rounds are too "
        "few, so differences of that size between kernels mean nothing here."
    )
    return [said]


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _draw(table: Group, svg: Path) -> None:
    console = Console(record=True, width=150, file=io.StringIO())
    console.print(table)
    picture = console.export_svg(title="tilery bench")
    files.write(svg, re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL))  # no fonts from the network


def _line(row: "Row") -> tuple[str, ...]:
    return (
        row.op, row.case, row.kernel, *_measures(row), "" if row.inputs == "cold" else row.inputs,
        common.number(row.error, ".0e"), common.number(row.registers), common.number(row.spills),
        common.number(row.shared), common.styled(row.status),
    )  # fmt: skip


def _compiled_line(row: "Row") -> tuple[str, ...]:
    used = (common.number(value) for value in (row.registers, row.spills, row.shared))
    return row.op, row.case, row.kernel, row.arch, *used


def _measures(row: "Row") -> tuple[str, ...]:
    """Time, half its interval, rate, share of the roof, ratio; TFLOP/s where arithmetic is the question."""
    if row.ms is None or row.ms_low is None or row.ms_high is None or row.gbps is None or row.tflops is None:
        return ("",) * 5
    rate = f"{row.tflops:.2f} TFLOP/s" if row.tflops * 1e3 > 20 * row.gbps else f"{row.gbps:.1f} GB/s"
    half = (row.ms_high - row.ms_low) / 2
    digits = max(4, 3 - math.floor(math.log10(row.ms))) if row.ms > 0 else 4  # at least four that say something
    ms, half_ms = (f"{value:.{digits}f}" for value in (row.ms, half))
    return ms, half_ms, rate, common.number(row.roof, ".0%"), common.number(row.ratio, ".2f")
