"""`tilery plot`: runs as a picture."""

from pathlib import Path
from typing import Annotated

import typer

from tilery.base.errors import BadInput
from tilery.cli import common
from tilery.cli.report import Runs


def plot(
    runs: Runs = None,
    out: Annotated[Path, typer.Option("-o", "--out", help="The file to write: .png or .svg.")] = Path("plot.png"),
    kind: Annotated[str, typer.Option(help="ratio, roofline, time, heat or landscape.")] = "ratio",
    op: Annotated[str | None, typer.Option(help="Only this op.")] = None,
    json: common.Json = False,
) -> None:
    """Draw runs: ratios to torch, roofline, time against size, op by language, or a tune. Needs matplotlib."""
    from tilery.base import files
    from tilery.measure.store import Store
    from tilery.pages import plot as workbench
    from tilery.pages import summary

    form = out.suffix.removeprefix(".")
    if form not in workbench.FORMATS:
        raise BadInput(f"--out must end in .{' or .'.join(workbench.FORMATS)}, got {str(out)!r}")
    if kind not in workbench.KINDS:
        raise BadInput(f"--kind must be one of {', '.join(workbench.KINDS)}, got {kind!r}")
    common.require_writable(out)
    collected = summary.collect(Store(), runs)
    files.write(out, workbench.picture(collected, kind, form, op))
    if json:
        common.print_json(summary.all_rows(collected), file=str(out), **summary.document(collected))
    else:
        print(f"{kind} in {out}")
