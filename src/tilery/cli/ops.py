"""`tilery ops`: ops × kernels, and what each can do here."""

from tilery.cli import common


def ops(ops: common.Ops = None, json: common.Json = False) -> None:
    """List ops and kernels: which run here, compile here or refuse, and why."""
    from tilery import device
    from tilery.workbench.place import place
    from tilery.workbench.result import Row

    rows: list[Row] = []
    for op in common.chosen_ops(ops):
        for kernel in op.kernels:
            where = place(op, kernel)
            row = Row(op.name, kernel, "", "pass", arch=where.arch)
            if where.device is not None:
                row.device = "interpreter" if where.interpreted else device.name(where.device)
            else:
                row.status, row.reason = "compiled" if where.arch else "refused", where.reason
            rows.append(row)
    if json:
        common.print_json(rows)
        return
    words = {"pass": "runs here", "compiled": "compiles here", "refused": "refuses"}
    lines = [
        (
            r.op,
            r.kernel,
            f"[{common.STYLE[r.status]}]{words[r.status]}[/]",
            r.device or r.arch,
            common.literal(r.reason),
        )
        for r in rows
    ]
    common.console().print(common.table("Ops and kernels", ("op", "kernel", "here", "where", "reason"), lines))
