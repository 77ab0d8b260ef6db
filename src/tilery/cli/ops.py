"""`tilery ops`: ops × kernels, and what each can do here."""

from typing import TYPE_CHECKING, Annotated

import typer

from tilery.cli import common
from tilery.cli.tables import Reason, Reasons, Table, key, long

if TYPE_CHECKING:
    from tilery.core.op import Op
    from tilery.measure.result import Row

_CAN = {"pass": "runs here", "compiled": "compiles here", "refused": "refuses"}


def ops(
    ops: common.Ops = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="What each op means, as docs/ops.md has it.")] = False,
    models: Annotated[
        bool, typer.Option("--models", help="What tilery.patch replaces in which model, as docs/models.md has it.")
    ] = False,
    json: common.Json = False,
) -> None:
    """List ops and kernels: which run here, compile here or refuse, and why."""
    if models:
        from tilery.patch import document

        print(document.markdown(), end="")
        return
    if markdown:
        print(_document(common.chosen_ops(ops)), end="")
        return
    from tilery.hardware import device
    from tilery.measure.place import place
    from tilery.measure.result import Row

    rows: list[Row] = []
    for op in common.chosen_ops(ops):
        for kernel in op.kernels:
            where = place(op, kernel)
            row = Row(op.name, kernel, "", "pass", arch=where.arch)
            if where.device is not None:
                row.device = where.interpreted or device.name(where.device)
            else:
                row.status, row.reason = "compiled" if where.arch else "refused", where.reason
            rows.append(row)
    if json:
        common.print_json(rows)
        return
    _print(rows)


def _print(rows: "list[Row]") -> None:
    """A line an op: its kernels by what they can do here."""
    lines = []
    for op in dict.fromkeys(row.op for row in rows):
        kernels = {s: ", ".join(row.kernel for row in rows if (row.op, row.status) == (op, s)) for s in _CAN}
        lines.append((op, *(f"[{common.STYLE[s]}]{kernels[s]}[/]" if kernels[s] else "" for s in _CAN)))
    common.say(Table("Ops and kernels", (key("op"), *map(long, _CAN.values())), lines), "")
    for status in ("pass", "compiled"):
        said = dict.fromkeys(part for r in rows if r.status == status for part in (r.device or r.arch, r.reason))
        if said:
            common.say(f"{_CAN[status]}: {', '.join(filter(None, said))}")
    refused = (Reason(_CAN[row.status], row.reason, row.kernel) for row in rows if row.status == "refused")
    common.say(Reasons(refused, {_CAN[status]: style for status, style in common.STYLE.items() if status in _CAN}))


def _document(ops: "list[Op]") -> str:
    """From the contracts alone: signature, meaning, gradient, kernels in order of preference."""
    lines = [
        "# Ops",
        "",
        "Made by `tilery ops --markdown`. Kernels are in order of preference. ∇: autograd goes through it. A name that",
        "ends in `_` works in place. `vendor` is cuBLAS through torch, and runs where it is named or tuned alone.",
        "Every op is also `torch.ops.tilery.<op>`.",
        "",
        "| op | meaning | kernels |",
        "|---|---|---|",
    ]
    for op in sorted(ops, key=lambda op: op.name):
        meaning = " ".join((op.reference.__doc__ or "").split("\n\n")[0].split()).replace("|", "\\|")
        gradient = " ∇" if op.backward is not None else ""
        cells = (f"`{op.name}({_parameters(op)})`{gradient}", meaning, ", ".join(op.kernels))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _parameters(op: "Op") -> str:
    """Names and defaults, without the types."""
    return ", ".join(str(p.replace(annotation=p.empty)) for p in op.signature.python.parameters.values())
