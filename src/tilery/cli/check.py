"""`tilery check`: error against float64."""

from typing import TYPE_CHECKING

import typer

from tilery.cli import common

if TYPE_CHECKING:
    from tilery.measure.result import Row


def check(
    ops: common.Ops = None,
    backend: common.Backends = None,
    case: common.CaseText = None,
    shapes: common.Shapes = None,
    n: common.Width = None,
    k: common.Depth = None,
    m: common.Rows = None,
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
                rows += workbench.rows(op, [kernel], cases, compiler, say)
                count()
    failed = [row for row in rows if row.status == "fail"]
    if json:
        common.print_json(rows, **common.shapes_said(shapes))
    else:
        _print(rows, failed, common.shapes_title(shapes))
    raise typer.Exit(1 if failed else 0)


def _print(rows: "list[Row]", failed: "list[Row]", more: str) -> None:
    console = common.console()
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.op, row.kernel), []).append(row)
    columns = ("op", "kernel", "pass", "refused", "compiled", "skipped", "fail", "worst error", "where", "reason")
    lines = []
    for (op, kernel), group in groups.items():
        counts = [sum(row.status == status for row in group) for status in columns[2:7]]
        worst = max((row.error for row in group if row.error is not None), default=None)
        where = next((row.device or row.arch for row in group if row.device or row.arch), "")
        reason = next((row.reason for row in group if row.status == "skipped"), "")
        shown = [f"[{common.STYLE[s]}]{n}[/]" if n else "" for s, n in zip(columns[2:7], counts)]
        lines.append((op, kernel, *shown, common.number(worst, ".1e"), where, common.literal(reason)))
    right = (*columns[2:8],)
    console.print(common.table(f"Cases checked against float64{more}", columns, lines, right))
    for row in failed:
        console.print(f"[bold red]fail[/] {row.op} {row.kernel} {row.case}", highlight=False)
        console.print(f"  {row.reason}", markup=False, highlight=False)
