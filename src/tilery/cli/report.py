"""`tilery report`: runs as one html page."""

from pathlib import Path
from typing import Annotated

import typer

from tilery.cli import common

Runs = Annotated[
    list[str] | None, typer.Argument(metavar="[RUN]...", help="Ids, or how they begin; the last run if none is named.")
]


def report(
    runs: Runs = None,
    out: Annotated[Path, typer.Option("-o", "--out", help="The file to write.")] = Path("report.html"),
    title: Annotated[str | None, typer.Option(help="The page's title; the devices if none.")] = None,
    json: common.Json = False,
) -> None:
    """Write runs as one html page with charts and a table that sorts and filters; it needs no network."""
    from tilery.base import files
    from tilery.measure.store import Store
    from tilery.pages import report as workbench
    from tilery.pages import summary

    common.require_writable(out)
    store = Store()
    collected = summary.collect(store, runs)
    page = workbench.render(store, collected, title).encode(errors="replace")
    files.write(out, page)
    if json:
        common.print_json(summary.all_rows(collected), file=str(out), **summary.document(collected))
        return
    rows, count = len(collected.found) + len(collected.tunes), len(collected.runs)
    print(f"{rows} rows of {count} run{'' if count == 1 else 's'} in {out} ({len(page) / 1e3:.0f} kB)")
