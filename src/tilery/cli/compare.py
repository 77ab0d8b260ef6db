"""`tilery compare`: a regression gate between two runs."""

from dataclasses import asdict
from typing import Annotated

import typer

from tilery.cli import common
from tilery.cli.tables import Table, fact, figure, heading, key

_COLUMNS = (
    heading("op"), heading("case"), key("kernel"), figure("B over A"), figure("95 %"), fact("by"), key("verdict"),
)  # fmt: skip


def compare(
    first: Annotated[str, typer.Argument(metavar="A", help="The run to hold against: an id, its beginning, or last.")],
    second: Annotated[str, typer.Argument(metavar="B", help="The run in question.")],
    threshold: Annotated[float, typer.Option(min=0.0, max=1.0, help="Slower by this share is a regression.")] = 0.03,
    json: common.Json = False,
) -> None:
    """Compare two runs row by row; exit 1 if a kernel got slower past the threshold, interval and all."""
    from tilery.measure.store import Store
    from tilery.pages.compare import compare as workbench

    store = Store()
    changes = workbench(store, store.find(first), store.find(second))
    worse = [change for change in changes if change.regressed(threshold)]
    if json:
        common.print_json([], changes=[asdict(c) | {"regressed": c in worse} for c in changes])
    else:
        lines = [
            (c.op, c.case, c.kernel, f"{c.speed:.3f}", f"{c.low:.3f} – {c.high:.3f}", c.by,
             "[bold red]slower[/]" if c in worse else "[green]faster[/]" if c.low > 1 else "")
            for c in changes
        ]  # fmt: skip
        common.say(
            Table(f"{second} held against {first}", _COLUMNS, lines),
            f"{len(worse)} of {len(changes)} rows slower by more than {threshold:.0%}",
        )
    raise typer.Exit(1 if worse else 0)
