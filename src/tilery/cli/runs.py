"""`tilery runs`: what was measured, and taking it elsewhere."""

from pathlib import Path
from typing import Annotated

import typer

from tilery.base.errors import BadInput
from tilery.cli import common
from tilery.cli.tables import Table, fact, figure, key, long

runs = typer.Typer(help="List stored runs; export and import them.", invoke_without_command=True)


@runs.callback()
def listed(context: typer.Context, json: common.Json = False) -> None:
    """List stored runs, latest last."""
    if context.invoked_subcommand is not None:
        return
    from dataclasses import asdict

    from tilery.measure.store import Store

    store = Store()
    found = store.runs()
    if json:
        common.print_json([], runs=[asdict(run) for run in found])
        return
    lines = []
    for run in found:
        rows = store.rows(run.id)
        where = run.machine.get("gpu") or run.machine.get("cpu") or ""
        state = "[green]finished[/]" if run.finished else "[yellow]stopped[/]"
        shapes = run.machine.get("shapes") or ""
        command = run.command if shapes in run.command else f"{run.command} ({shapes})"
        lines.append((run.id, state, str(len(rows)), where, common.literal(command)))
    if lines:
        columns = (key("run"), fact("state"), figure("rows"), fact("device"), long("command"))
        common.say(Table("Runs", columns, lines))
    else:
        print("no runs yet: `tilery bench` makes one")


@runs.command("export")
def exported(
    names: Annotated[list[str] | None, typer.Argument(metavar="[RUN]...", help="All if none.")] = None,
    out: Annotated[Path, typer.Option("-o", "--out", help="The file to write.")] = Path("runs.json"),
    form: Annotated[str | None, typer.Option("--format", help="json, csv or parquet; by the file's ending.")] = None,
    json: common.Json = False,
) -> None:
    """Write runs to a file: json holds everything, csv and parquet one line a row."""
    from tilery.measure.store import FORMATS, Store, export

    form = form or out.suffix.removeprefix(".")
    if form not in FORMATS:
        raise BadInput(f"--format must be one of {', '.join(FORMATS)}, got {form!r}")
    common.require_writable(out)
    store = Store()
    chosen = [store.find(name) for name in names] if names else store.runs()
    count = export(store, chosen, out, form)
    if json:
        common.print_json([], file=str(out), runs=[run.id for run in chosen], row_count=count)
    else:
        print(f"{count} rows of {len(chosen)} runs in {out}")


@runs.command("import")
def imported(path: Annotated[Path, typer.Argument(help="A json export.")], json: common.Json = False) -> None:
    """Bring back runs from a json export; those that are here already stay as they are."""
    from tilery.measure.store import Store, import_runs

    new, known = import_runs(Store(), path)
    if json:
        common.print_json([], new=new, known=known)
    else:
        print(f"{new} new runs, {known} already here")
