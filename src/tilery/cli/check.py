"""`tilery check`: error against float64."""

import math
import re
from typing import TYPE_CHECKING, Annotated

import typer

from tilery.cli import common
from tilery.cli.tables import JOINED, Command, Reason, Reasons, Table, fact, figure, heading, key

if TYPE_CHECKING:
    from tilery.measure.result import Row

_STATUSES = ("pass", "refused", "compiled", "skipped", "fail")
_COLUMNS = (
    heading("op"), key("kernel"), *map(figure, _STATUSES), figure("worst error"), figure("allowed"), fact("where", 1),
)  # fmt: skip


def check(
    ops: common.Ops = None,
    backend: common.Backends = None,
    case: common.CaseText = None,
    shapes: common.Shapes = None,
    n: common.Width = None,
    k: common.Depth = None,
    m: common.Rows = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Of the inputs; another one for every case if not given.")
    ] = None,
    json: common.Json = False,
) -> None:
    """Check kernels against a float64 reference; what cannot run here is compiled."""
    from tilery.measure import check as workbench
    from tilery.measure.compile import Compiler
    from tilery.measure.place import chosen_kernels, require_known

    chosen, given, shapes = common.chosen_ops(ops), common.product(n, k, m), common.settled_shapes(shapes)
    require_known(chosen, backend, "--backend")
    rows: list[Row] = []
    with Compiler() as compiler, common.progress(sum(len(op.kernels) for op in chosen)) as (say, count):
        for op in chosen:
            wanted = common.chosen_cases(op, case, shapes, given)
            cases = op.cases["test"] if wanted is None else wanted
            for kernel in chosen_kernels(op, backend):
                rows += workbench.rows(op, [kernel], cases, compiler, say, seed)
                count()
    failed = [row for row in rows if row.status == "fail"]
    if json:
        common.print_json(rows, **common.shapes_said(shapes))
    else:
        _print(rows, failed, common.shapes_title(shapes))
    raise typer.Exit(1 if failed else 0)


def _print(rows: "list[Row]", failed: "list[Row]", more: str = "") -> None:
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.op, row.kernel), []).append(row)
    lines = []
    for (op, kernel), group in groups.items():
        counts = {status: sum(row.status == status for row in group) for status in _STATUSES}
        shown = [f"[{common.STYLE[status]}]{count}[/]" if count else "" for status, count in counts.items()]
        worst = max((row for row in group if row.error is not None), key=_badness, default=None)
        errors = (worst.error, worst.allowed) if worst else (None, None)
        where = next((row.device or row.arch for row in group if row.device or row.arch), "")
        lines.append((op, kernel, *shown, *(common.number(value, ".1e") for value in errors), where))
    common.say(Table(f"Cases checked against float64{more}", _COLUMNS, lines))
    common.say(common.reasons(rows, ("skipped",)))
    if failed:
        found = [Reason("fail", _why(row), f"{row.op} {row.kernel}", _input(row)) for row in failed]
        common.say("", Reasons(found, common.STYLE), "", "to repeat the first of each:")
        for row in {(row.op, row.kernel, _why(row)): row for row in reversed(failed)}.values():
            common.say(Command(_command(row), indent=2))


def _badness(row: "Row") -> tuple[bool, float]:
    """Failures before what passes, then by how much of the allowed error is used; NaN is the worst."""
    error, allowed = row.error, row.allowed
    assert error is not None
    used = math.inf if math.isnan(error) else error / allowed if allowed else error
    return row.status == "fail", used


def _why(row: "Row") -> str:
    """Its reason without what stands beside it: op, kernel, case and seed."""
    where = re.escape(f"{row.op} {row.kernel} {row.case}")
    return re.sub(rf"^{where}( seed=\d+)?: ", "", row.reason)


def _input(row: "Row") -> str:
    return row.case + (f"{JOINED}seed={row.seed}" if row.seed is not None else "")


def _command(row: "Row") -> str:
    seed = f" --seed{JOINED}{row.seed}" if row.seed is not None else ""
    return f"tilery check {row.op} --backend{JOINED}{row.kernel} --case{JOINED}{row.case}{seed}"
