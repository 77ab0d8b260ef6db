"""`tilery ladder`: a matrix product in CUDA C++ from naive to the shipped kernel, built, checked and timed."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group

from tilery.base.errors import BadInput
from tilery.cli import common
from tilery.cli.tables import Paragraph, Table, fact, figure, heading, key, long

if TYPE_CHECKING:
    from tilery.base.spec import Case
    from tilery.measure.result import Row

_COLUMNS = (
    heading("case"), figure(""), key("kernel"), figure("TFLOP/s", 1), figure("ms"), figure("± 95 %"),
    figure("% of torch"), figure("× first", 2), figure("error"), figure("regs", 5), figure("spills", 4),
    figure("shared", 6), fact("needs", 3), fact("status"), fact("for"), long("idea"),
)  # fmt: skip


def ladder(
    rungs: Annotated[
        list[str] | None, typer.Argument(metavar="[RUNG]...", help="By name or number; all of them if none is named.")
    ] = None,
    size: Annotated[str, typer.Option("--size", help="M = N = K: 4096,8192.")] = "4096",
    case: Annotated[str | None, typer.Option("--case", help="Instead of --size: m=512,n=4096,k=1024.")] = None,
    screen: common.Screen = False,
    rounds: common.Rounds = None,
    turn_ms: common.TurnMs = None,
    plot: Annotated[Path | None, typer.Option(help="Draw what was timed: .svg or .png.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the rows to this file too.")] = None,
    json: common.Json = False,
) -> None:  # fmt: skip
    """Build, check and time a matrix product rung by rung, from naive CUDA C++ to the shipped kernel."""
    from tilery.base import files
    from tilery.ladder.plot import picture
    from tilery.ladder.run import chosen, run
    from tilery.measure import csv_file, result
    from tilery.measure.store import Store
    from tilery.pages.plot import FORMATS

    form = plot.suffix.removeprefix(".") if plot else ""
    if plot and form not in FORMATS:
        raise BadInput(f"--plot must end in .{' or .'.join(FORMATS)}, got {str(plot)!r}")
    common.require_writable(plot)
    common.require_writable(csv)
    names, cases = chosen(rungs), _cases(size, case)
    depth = common.depth(screen, rounds, turn_ms)
    with common.progress() as (say, _):
        done = run(names, cases, Store(), depth, say)
    rows = _in_order(done.rows)
    if csv:
        csv_file.write(csv, result.COLUMNS, result.lines(rows))
    if json:
        common.print_json(rows, run=done.id, protocol=done.protocol, minutes=round(done.minutes, 2))
    else:
        common.console().print(_table(rows))
        if any(row.status == "compiled" for row in rows):
            common.remark("no GPU here: the rungs were compiled, not run; on one this command checks and times them")
        common.remark(f"kept as run {done.id}: {done.made_by}")
    if plot:
        files.write(plot, picture(rows, form))
    raise typer.Exit(1 if any(row.status == "fail" for row in rows) else 0)


def _cases(size: str, text: str | None) -> "list[Case]":
    from tilery.base.spec import Case
    from tilery.ladder.rungs import product

    if text is None:
        return [Case({"m": s, "n": s, "k": s, "dtype": "bf16"}) for s in common.numbers("--size", size)]
    params = common.parsed_case(product(), text).params
    return [Case({**params, "dtype": params.get("dtype", "bf16")})]


def _in_order(rows: "list[Row]") -> "list[Row]":
    """Problem by problem, torch first, then rung by rung: rows arrive as they are found."""
    from tilery.ladder.rungs import RUNGS

    problems, places = list(dict.fromkeys(row.case for row in rows)), {name: i for i, name in enumerate(RUNGS)}
    return sorted(rows, key=lambda row: (problems.index(row.case), places.get(row.kernel, -1), row.arch))


def _table(rows: "list[Row]") -> Group:
    from tilery.ladder.rungs import RUNGS
    from tilery.measure.result import machine

    first: dict[str, float] = {}  # problem -> ms of its first rung that has a time
    for row in rows:
        if row.kernel in RUNGS and row.ms is not None:
            first.setdefault(row.case, row.ms)
    here = machine()
    title = f"tilery ladder on {here['gpu'] or here['cpu']}, torch {here['torch']}"
    lines = [_line(row, first.get(row.case)) for row in rows if row.status not in ("refused", "skipped")]
    return Group(Table(title, _COLUMNS, lines) if lines else Paragraph(title), common.reasons(rows))


def _line(row: "Row", first: float | None) -> tuple[str, ...]:
    from tilery.ladder.rungs import RUNGS

    rung = RUNGS.get(row.kernel)
    half = (row.ms_high - row.ms_low) / 2 if row.ms_high is not None and row.ms_low is not None else None
    return (
        row.case, str(rung.number) if rung else "", row.kernel, common.number(row.tflops, ".4g"),
        common.number(row.ms, ".4f"), common.number(half, ".4f"), common.number(row.ratio, ".1%"),
        f"{first / row.ms:.1f}" if rung and first and row.ms else "",
        common.number(row.error, ".0e"), common.number(row.registers), common.number(row.spills),
        common.number(row.shared), rung.needs if rung else "",
        common.styled(row.status), row.arch,
        rung.idea if rung and row.status == "compiled" else "",
    )  # fmt: skip
