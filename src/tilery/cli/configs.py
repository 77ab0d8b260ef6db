"""`tilery configs`: what was tuned, taking it elsewhere, and whether it still holds."""

import contextlib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilery.base.errors import BadInput
from tilery.cli import common
from tilery.cli.tables import Reason, Reasons, Table, fact, figure, heading, key, long

if TYPE_CHECKING:
    from tilery.core.tuned import Entry
    from tilery.tuning.kept import File
    from tilery.tuning.sglang import Exported
    from tilery.tuning.verify import Group

_LISTED = (
    key("op"), fact("device"), fact("origin"), figure("buckets"), figure("entries"), figure("stale"), long("file"),
)  # fmt: skip
_SHOWN = (
    heading("bucket"), figure("rank"), key("kernel"), figure("ms"), figure("95 %"), figure("error"),
    figure("roof", 1), figure("registers", 3), figure("spills", 2), fact("bits", 4), fact("origin", 5),
    fact("when", 6), long("config"),
)  # fmt: skip
_VERIFIED = (
    heading("op"), heading("case"), key("kernel"), figure("ms"), figure("error"), key("status"), long("config"),
)  # fmt: skip

Device = Annotated[str | None, typer.Option("--device", help="One device alone, by its name in the list.")]

configs = typer.Typer(help="List, show, import, export and verify tuned configs.", invoke_without_command=True)


@configs.callback()
def all_of_them(context: typer.Context, json: common.Json = False) -> None:
    """Without a verb: list."""
    if context.invoked_subcommand is None:
        listed(None, json)


@configs.command("list")
def listed(ops: common.Ops = None, json: common.Json = False) -> None:
    """List the files of tuned configs: of which op and device, how many buckets, how many are stale."""
    from tilery.tuning import kept

    found = kept.files(common.chosen_ops(ops))
    strangers = [] if ops else kept.strangers()
    bad = any(each.failure for each in found)
    if json:
        common.print_json([], files=[_plain(each) for each in found], strangers=[str(path) for path in strangers])
        raise typer.Exit(bad)
    lines = [
        (
            each.op, each.device, each.owner, str(each.buckets or ""), str(len(each.entries) or ""),
            str(len(each.stale) or ""), common.literal(str(each.path)),
        )
        for each in found
    ]  # fmt: skip
    if lines:
        common.say(Table("Tuned configs", _LISTED, lines))
    else:
        print("nothing is tuned yet: `tilery tune OP` does it")
    common.say(*(f"cannot be read: {each.failure}" for each in found if each.failure))
    common.say(*(f"no op of this name is here: {path}" for path in strangers))
    raise typer.Exit(bad)


def _plain(found: "File") -> dict[str, Any]:
    counts = {"buckets": found.buckets, "entries": len(found.entries), "stale": len(found.stale)}
    names = {"op": found.op, "device": found.device, "owner": found.owner, "path": str(found.path)}
    return names | counts | {"failure": found.failure}


@configs.command("show")
def show(
    op: Annotated[str, typer.Argument(metavar="OP", help="Whose entries.")],
    device: Device = None,
    json: common.Json = False,
) -> None:
    """Show an op's entries: the winner of every bucket, those behind it, and what was measured of them."""
    from dataclasses import asdict

    from tilery.base.errors import BadTunedFile
    from tilery.core import tuned
    from tilery.tuning import kept

    everything = kept.files(common.chosen_ops([op]))
    found = [each for each in everything if device in (None, each.device)]
    for each in found:
        if each.failure:
            raise BadTunedFile(each.failure)
    if not found:
        there = ", ".join(dict.fromkeys(each.device for each in everything)) or "none: `tilery tune` makes them"
        raise BadInput(f"{op} has no tuned configs" + (f" of {device!r}" if device else "") + f"; there are {there}")
    if json:
        entries = [
            asdict(e) | {"owner": each.owner, "path": str(each.path), "stale": tuned.stale(e)}
            for each in found
            for e in each.entries
        ]
        common.print_json([], entries=entries)
        return
    for each in found:
        title = f"{each.op} on {each.device}, {each.owner}: {each.path}"
        stale = [(entry, "; ".join(tuned.stale(entry))) for entry in each.entries]
        common.say(
            Table(title, _SHOWN, map(_shown, each.entries)),
            Reasons(Reason("stale", why, entry.kernel, _bucket(entry)) for entry, why in stale if why),
        )


def _bucket(entry: "Entry") -> str:
    return ",".join((*(f"{name}={value}" for name, value in entry.scaled.items()), entry.exact))


def _shown(entry: "Entry") -> tuple[str, ...]:
    config = ",".join(f"{name}={value}" for name, value in entry.config.items())
    measured = _evidence(entry)
    return _bucket(entry), str(entry.rank), entry.kernel, *measured, entry.origin, entry.when, common.literal(config)


def _evidence(entry: "Entry") -> tuple[str, ...]:
    """Nothing of what comes from elsewhere without any."""
    if not entry.when:
        return ("",) * 7
    return (
        f"{entry.ms:.4g}", f"{entry.interval[0]:.4g} to {entry.interval[1]:.4g}", f"{entry.error:.1e}",
        f"{entry.roof:.0%}", common.number(entry.registers), common.number(entry.spills),
        "the same" if entry.bit_identical else "vary",
    )  # fmt: skip


@configs.command("export")
def exported(
    ops: common.Ops = None,
    to: Annotated[
        Path | None,
        typer.Option("--to", help="The file to write, tuned.json if not given; of sglang and vllm, the folder."),
    ] = None,
    device: Device = None,
    form: Annotated[str, typer.Option("--format", help="tilery; sglang or vllm: a file per N and K.")] = "tilery",
    partial: Annotated[
        bool, typer.Option("--partial", help="Of sglang and vllm: also files that lack some of the 18 M.")
    ] = False,
    json: common.Json = False,
) -> None:
    """Write what was tuned: into one file for another machine to import, or into those that SGLang or vLLM reads."""
    from tilery.tuning import exchange

    if form not in ("tilery", "sglang", "vllm"):
        raise BadInput(f"--format must be tilery, sglang or vllm, got {form!r}")
    if form != "tilery":
        _export_for(form, ops, to, device, partial, json)
        return
    if partial:
        raise BadInput("--partial is of --format sglang and vllm, got --format tilery")
    to = to or Path("tuned.json")
    common.require_writable(to)
    found = exchange.export(to, common.chosen_ops(ops), device)
    count = sum(len(each.entries) for each in found)
    if json:
        made = [{"op": each.op, "device": each.device, "entries": len(each.entries)} for each in found]
        common.print_json([], file=str(to), exported=made)
    else:
        print(f"{count} entries of {len({each.op for each in found})} ops in {to}")


def _export_for(
    program: str, ops: list[str] | None, to: Path | None, device: str | None, partial: bool, json: bool
) -> None:
    """Exit 1 where no file is whole, so that none was written."""
    from tilery.tuning import sglang

    if strange := [op.name for op in common.chosen_ops(ops or [sglang.OP]) if op.name != sglang.OP]:
        raise BadInput(f"--format {program} is for {sglang.OP}, got {', '.join(strange)}")
    found = sglang.export(to, device, program, partial)
    if json:
        made, lacking = ([each._asdict() | {"path": str(each.path)} for each in files]
                         for files in (found.written, found.partial))  # fmt: skip
        common.print_json([], exported=made, left_out=found.left_out, partial=lacking)
    else:
        _print_exported(found)
    raise typer.Exit(0 if found.written else 1)


def _print_exported(found: "Exported") -> None:
    for each in found.written:
        others = f", {len(each.kept)} others as they were" if each.kept else ""
        lacking = f", without {_rows(each.missing)}" if each.missing else ""
        print(f"{each.kernel}, M of {_rows(each.rows)}{others}{lacking}: {each.path}")
    for why in found.left_out:
        print(f"left out: {why}")
    for each in found.partial:
        print(f"not written, lacks M of {_rows(each.missing)}: {each.path}\n  {each.command}")
    if found.partial:
        print("A file is applied to every M, by the nearest that it has; --partial writes those that lack some too.")


def _rows(rows: list[int]) -> str:
    return ",".join(map(str, rows))


@configs.command("import")
def imported(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE]",
            help="An export, a file of tuned configs, or SGLang's: a file, a folder, or where "
            "SGLANG_TILELANG_GEMM_CONFIG_DIR says if not given.",
        ),
    ] = None,
    as_candidates: Annotated[
        bool, typer.Option("--as-candidates", help="Those of this device too: to be measured before they are used.")
    ] = False,
    json: common.Json = False,
) -> None:
    """Bring in configs: this device's are used at once, another's are candidates for `tune` and `configs verify`."""
    from tilery.tuning import exchange

    found = exchange.bring(path, as_candidates)
    counts = Counter(each.kept_as for each in found)
    if json:
        rows = [
            {"op": b.op, "device": b.device, "kernel": b.entry.kernel, "config": b.entry.config, "exact": b.entry.exact,
             "scaled": b.entry.scaled, "kept_as": b.kept_as, "reason": b.reason}
            for b in found
        ]  # fmt: skip
        common.print_json([], imported=rows)
        return
    print(f"{counts['entry']} entries, {counts['candidate']} candidates, {counts['refused']} refused")
    for (op, kernel, why), count in Counter(
        (b.op, b.entry.kernel, b.reason) for b in found if b.kept_as == "refused"
    ).items():
        print(f"  {op} {kernel} refused{f' {count} times' if count > 1 else ''}: {why}")
    if counts["candidate"]:
        print("`tilery configs verify --fix` measures the candidates here and keeps what is fast")


@configs.command("verify")
def verified(
    ops: common.Ops = None,
    fix: Annotated[
        bool, typer.Option("--fix", help="Keep what was measured now: right ones ranked anew, wrong ones gone.")
    ] = False,
    json: common.Json = False,
) -> None:
    """Check and time entries and candidates here; exit 1 if one is stale, wrong, or slower than it says."""
    from tilery.tuning import kept, pool, verify

    found = verify.groups(common.chosen_ops(ops))
    with (
        contextlib.closing(pool.LocalPool([str(where) for where in kept.here()])) as children,
        common.progress(len(found)) as (say, count),
    ):
        for group in found:
            verify.measure(group, children, say)
            count()
    failed = [group for group in found if not group.sound]
    candidates = [group for group in found if any(item.kind == verify.CANDIDATE for item in group.items)]
    mended = [group for group in found if (group in failed or group in candidates) and verify.fix(group)] if fix else []
    left = [group for group in failed if group not in mended]
    if json:
        common.print_json([row for group in found for row in group.rows()], fixed=len(mended))
    else:
        _print(found, mended)
    raise typer.Exit(1 if left else 0)


def _print(found: "list[Group]", mended: "list[Group]") -> None:
    rows = [row for group in found for row in group.rows()]
    if not rows:
        print("nothing is tuned for this machine: `tilery tune OP` does it")
        return
    lines = [
        (
            row.op, row.case, row.kernel, common.number(row.ms, ".4g"), common.number(row.error, ".1e"),
            common.styled(row.status), common.literal(row.config),
        )
        for row in rows
    ]  # fmt: skip
    common.say(Table("Tuned configs, measured again", _VERIFIED, lines))
    common.say(common.reasons(rows, ("pass", "fail", "refused", "skipped")))
    if mended:
        print(f"{len(mended)} buckets were written anew")
    elif any(row.status == "fail" for row in rows):
        common.say("`tilery configs verify --fix` keeps what was measured now; `tilery tune OP` searches anew")
