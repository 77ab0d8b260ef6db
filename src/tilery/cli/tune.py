"""`tilery tune`: the fastest kernel and config of every shape, checked against float64 and kept."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from tilery.base.errors import BadInput
from tilery.cli import common
from tilery.cli.tables import Reason, Reasons, Table, fact, figure, heading, key, long

if TYPE_CHECKING:
    from tilery.tuning.tuner import Status, Tuned, TuneResult

_COLUMNS = (
    heading("op"), heading("bucket"), key("kernel"), figure("ms"), figure("× default"), figure("95 %"),
    figure("error"), figure("roof", 1), figure("of", 3), fact("from", 2), long("config"),
)  # fmt: skip


def tune(
    ops: Annotated[list[str] | None, typer.Argument(metavar="[OP]...", help="Ops to tune; all of a --model's.")] = None,
    case: common.CaseText = None,
    shapes: common.Shapes = None,
    n: common.Width = None,
    k: common.Depth = None,
    m: common.Rows = None,
    model: Annotated[str | None, typer.Option(help="Shapes of a model, most valuable first: llama-8b …")] = None,
    tp: Annotated[int, typer.Option(min=1, help="Ranks of tensor parallelism; of a --model.")] = 1,
    backend: common.Backends = None,
    budget: Annotated[str, typer.Option(help="Time for all: 90s, 10m, 1h30m.")] = "10m",
    search: Annotated[str, typer.Option(help="halving, or exhaustive: everyone at full length.")] = "halving",
    bits: Annotated[str, typer.Option(help="any, or stable: the same bits as the default gives.")] = "any",
    gpus: Annotated[str | None, typer.Option(help="GPUs of this machine by number: 0,1.")] = None,
    num_gpus: Annotated[int | None, typer.Option(min=1, help="So many GPUs, through Ray.")] = None,
    timeout: Annotated[float, typer.Option(min=1.0, help="A candidate silent for so many seconds hangs.")] = 60.0,
    config_dir: Annotated[Path | None, typer.Option(help="Where to keep what won, if not in your own folder.")] = None,
    use: Annotated[
        str | None, typer.Option("--for", help="sglang: fp8_matmul as SGLang and vLLM can run it, for their files.")
    ] = None,
    json: common.Json = False,
) -> None:  # fmt: skip
    """Find the fastest kernel and config per shape, prove it right and keep it; the same command resumes."""
    from tilery.tuning import tune as tuned_by

    chosen = common.chosen_ops(ops) if ops else []
    given = common.product(n, k, m, model)
    if (case is not None or given) and len(chosen) != 1:
        raise BadInput(f"{'--N and --K are' if given else '--case is'} of one OP, got {len(chosen)}")
    if use is not None and not given and case is None and model is None:
        raise BadInput(f"--for {use} tunes a weight (--N and --K) or those of a --model, got neither")
    cases = common.chosen_cases(chosen[0], case, None, given) if chosen else None
    with _progress() as show:
        try:
            result = tuned_by(
                chosen, cases=cases, shapes=shapes, model=model, tp=tp, rows=None if given else given.rows,
                backend=backend, budget=budget, search=search, bits=bits, gpus=_numbers(gpus), num_gpus=num_gpus,
                timeout=timeout, config_dir=config_dir, use=use, progress=show,
            )  # fmt: skip
        except KeyboardInterrupt:
            raise KeyboardInterrupt("what was measured is kept, and the same command goes on from there") from None
    if json:
        common.print_json(_winners(result), **_document(result))
    else:
        _print(result)
        if use is not None and any(done.entries for done in result.tuned) and not result.not_reached:
            common.remark("`tilery configs export --format sglang` writes the files that are whole")
    raise typer.Exit(1 if any(not done.entries for done in result.tuned) else 0)


def _numbers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise BadInput(f"--gpus must be numbers of GPUs, separated by commas, got {text!r}")
    return [int(part) for part in parts]


@contextmanager
def _progress() -> "Iterator[Callable[[Status], None]]":
    """A line on stderr: problems done, candidates done, the best so far, time left."""
    terminal = common.console(sys.stderr)
    room = max(terminal.width - 40, 20) // 2  # of each text, beside the bar and the count
    shown = Progress(
        TextColumn("{task.description}", markup=False), BarColumn(bar_width=20), MofNCompleteColumn(),
        TextColumn("{task.fields[more]}", markup=False),
        console=terminal, transient=True, disable=not sys.stderr.isatty(),
    )  # fmt: skip
    with shown:
        task = shown.add_task("starting", total=None, more="")

        def show(now: "Status") -> None:
            left = f"{now.left_s // 60:.0f}:{now.left_s % 60:02.0f} left"
            best = f"best {now.best}" if now.best else now.what
            shown.update(
                task, description=f"{now.problems_done}/{now.problems} {now.problem}"[:room], completed=now.done,
                total=now.candidates, more=f"{left}  {best}"[:room],
            )  # fmt: skip

        yield show


def _print(result: "TuneResult") -> None:
    won = [done for done in result.tuned if done.outcome.ranked]
    if won:
        common.say(Table("tilery tune: what won", _COLUMNS, map(_line, won)))
    common.say(Reasons(_reasons(result)))
    common.remark(_times(result))
    if result.not_reached:
        common.remark(f"{len(result.not_reached)} not reached within the budget: the same command goes on")
    common.remark(f"kept as run {result.run}; `tilery report {result.run}` shows every candidate")


def _reasons(result: "TuneResult") -> Iterator[Reason]:
    """What went wrong with candidates; all of them where none won."""
    for done in result.tuned:
        of, tried = f"{done.problem.op} {done.name}", done.outcome.measured
        if not done.outcome.ranked:
            yield Reason("fail", "no candidate is good", of)
            tried = (*tried, *done.left_out)
        for found in tried:
            if found.status != "good" and (found.status != "refused" or not done.outcome.ranked):
                yield Reason(found.status, found.reason.partition("\n")[0], str(found.candidate), of)
        if done.outcome.cut_short:
            yield Reason("cut short", "time ran out before all were measured", of)


def _times(result: "TuneResult") -> str:
    parts = f"wall {result.wall_s:.1f} s, compiling {result.compile_s:.1f} s, measuring {result.measure_s:.1f} s"
    if result.overlap is None:
        return f"{parts}: all of it was measured before"
    return f"{parts}: {result.overlap:.2f} times the longer of the two"


def _line(done: "Tuned") -> tuple[str, ...]:
    won, gain = done.outcome.ranked[0], done.outcome.gain
    entry = next(e for e in done.entries if (e.kernel, e.config) == (won.candidate.kernel, won.candidate.config))
    return (
        done.problem.op, done.name, won.candidate.kernel, f"{won.ms:.4g}",
        f"{gain.ratio:.3f}" if gain else "", f"{gain.low:.3f} to {gain.high:.3f}" if gain else "",
        f"{won.error:.0e}", f"{entry.roof:.0%}", str(len(done.outcome.measured)), won.candidate.origin,
        common.literal(",".join(f"{name}={value}" for name, value in won.candidate.config.items())),
    )  # fmt: skip


def _winners(result: "TuneResult") -> Any:
    """A row for every problem: who won, or that nobody could."""
    from tilery.measure.result import Row
    from tilery.tuning.record import Recorded

    for done in result.tuned:
        if done.outcome.ranked:
            yield Recorded(done.problem).row(done.outcome.ranked[0], rank=0)
        else:
            yield Row(done.problem.op, "", done.name, "fail", "no candidate is good", stage="tune")


def _document(result: "TuneResult") -> dict[str, Any]:
    from dataclasses import asdict

    entries = [asdict(entry) | {"op": done.problem.op} for done in result.tuned for entry in done.entries]
    gains = [
        {"op": done.problem.op, "case": done.name, **(asdict(done.outcome.gain) if done.outcome.gain else {})}
        for done in result.tuned
    ]
    times = {"wall_s": result.wall_s, "compile_s": result.compile_s, "measure_s": result.measure_s}
    left = [str(problem) for problem in result.not_reached]
    return {
        "entries": entries,
        "gains": gains,
        **times,
        "overlap": result.overlap,
        "not_reached": left,
        "run": result.run,
    }
