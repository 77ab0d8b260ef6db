"""Options, choices and printing that the verbs share. Imports of torch wait until a verb runs."""

import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TextIO, get_args

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tilery.base.errors import BadInput
from tilery.cli import tables

if TYPE_CHECKING:
    from tilery.base.spec import Case
    from tilery.core.op import Op
    from tilery.measure import timing
    from tilery.measure.result import Row

_LINE_EVERY_S = 30.0  # of progress, where stderr is no terminal

Ops = Annotated[list[str] | None, typer.Argument(metavar="[OP]...", help="Ops to take; all of them if none is named.")]
Backends = Annotated[list[str] | None, typer.Option("--backend", "-b", help="Kernel or language; may be repeated.")]
CaseText = Annotated[str | None, typer.Option("--case", help="A case by its numbers: m=64,n=4096,k=8192,dtype=bf16.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object alone on stdout.")]

Width = Annotated[int | None, typer.Option("--N", min=1, help="With --K: a product [M, K] · [K, N] at every M.")]
Depth = Annotated[int | None, typer.Option("--K", min=1, help="With --N, see there.")]
Rows = Annotated[str | None, typer.Option("--M", help="Of --N and --K: 1,16,64; 1 to 4096 in 18 steps if not given.")]

Shapes = Annotated[
    str | None,
    typer.Option("--shapes", help="A set: llama-8b, deepseek-v3, quick …, random[:COUNT[:SEED]]; several by commas."),
]

Peers = Annotated[
    list[str] | None,
    typer.Option("--peers", help="all (if not given), none, or names: compile, liger …; torch takes part beside them."),
]

Screen = Annotated[bool, typer.Option("--screen", help="Six rounds of 2 ms turns: to find, not to claim.")]
Rounds = Annotated[
    int | None, typer.Option("--rounds", min=6, help="Turns there and back of every arm; 10 if not given.")
]
TurnMs = Annotated[
    float | None, typer.Option("--turn-ms", min=0.1, help="Milliseconds that a turn lasts at least; 10 if not given.")
]

STYLE = {"pass": "green", "fail": "bold red", "refused": "yellow", "compiled": "cyan", "skipped": "dim"}


PIPED_WIDTH = 120  # of what is no terminal


def console(stream: TextIO | None = None) -> Console:
    """A console on a stream, stdout if none is given: as wide as COLUMNS says, else as its terminal is, else 120."""
    stream = stream or sys.stdout
    given = os.environ.get("COLUMNS", "")
    width = int(given) if given.isdecimal() else os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    return Console(file=stream, width=width or PIPED_WIDTH, highlight=False)


def say(*shown: Any) -> None:
    """Prints tables, and texts as paragraphs, on stdout."""
    out = console()
    for each in shown:
        out.print(tables.Paragraph(each) if isinstance(each, str) else each)


def remark(text: str) -> None:
    """A paragraph on stderr; where that is no terminal, a line."""
    if sys.stderr.isatty():
        console(sys.stderr).print(tables.Paragraph(text))
    else:
        print(text, file=sys.stderr)


def reasons(rows: "Iterable[Row]", statuses: tuple[str, ...] = ("fail", "refused", "skipped")) -> tables.Reasons:
    """Why rows have one of these statuses."""
    found = (
        tables.Reason(row.status, row.reason, row.kernel, f"{row.op} {row.case}".strip())
        for row in rows
        if row.status in statuses and row.reason
    )
    return tables.Reasons(found, STYLE)


def chosen_ops(names: list[str] | None) -> "list[Op]":
    import tilery.ops  # noqa: F401  fills the registry
    from tilery.core.op import REGISTRY

    for name in names or []:
        if name not in REGISTRY:
            raise BadInput(f"OP must be one of {', '.join(sorted(REGISTRY))}, got {name!r}")
    return [REGISTRY[name] for name in names or REGISTRY]


def chosen_peers(ops: "list[Op]", asked: list[str] | None) -> dict[str, list[str]]:
    """Per op the baselines to time: all of them, none, or the ones named (without `baseline:`)."""
    from tilery.core.peers import PEERS

    names = [name for text in asked or ["all"] for name in text.split(",")]
    for name in names:
        if name not in ("all", "none", *PEERS):
            raise BadInput(f"--peers must be all, none, or some of {', '.join(PEERS)}, got {name!r}")
    if "none" in names and len(names) > 1:
        raise BadInput(f"--peers none stands alone, got {','.join(names)}")
    wanted = set(PEERS) if "all" in names else set(names)
    if "none" not in names:
        wanted.add("torch")  # all others are held against it, and it against itself
    return {op.name: [b for b in op.baselines if b.removeprefix("baseline:") in wanted] for op in ops}


def parsed_case(op: "Op", text: str) -> "Case":
    """`m=64,n=4096,dtype=bf16` against the parameters of the op's inputs."""
    from tilery.base.spec import Case

    if not text.strip():
        raise BadInput("--case must name a case by its numbers: m=64,n=4096,dtype=bf16; got nothing")
    known = {n: p for n, p in inspect.signature(op.inputs).parameters.items() if n not in ("device", "seed")}
    params: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or name not in known:
            raise BadInput(f"--case for {op.name} takes {', '.join(known)} as name=value, got {part!r}")
        params[name] = _parsed(name, value, known[name])
    missing = [n for n, p in known.items() if p.default is inspect.Parameter.empty and n not in params]
    if missing:
        raise BadInput(f"--case for {op.name} needs {', '.join(missing)}, got {text!r}")
    return Case(params)


def _parsed(name: str, value: str, parameter: inspect.Parameter) -> Any:
    """A value of a case as the parameter declares it: `int`, `float | None`, …"""
    kinds = get_args(parameter.annotation) or (parameter.annotation,)
    if bool in kinds:
        if value not in ("True", "False"):
            raise BadInput(f"--case: {name} must be True or False, got {value!r}")
        return value == "True"
    if int in kinds:
        below = isinstance(parameter.default, int) and parameter.default < 0
        if not (value.removeprefix("-") if below else value).isdecimal():
            raise BadInput(f"--case: {name} must be a whole number, got {value!r}")
        return int(value)
    if float in kinds:
        try:
            return float(value)
        except ValueError:
            raise BadInput(f"--case: {name} must be a number, got {value!r}") from None
    return value


class Product(NamedTuple):
    """--N, --K and --M."""

    n: int | None
    k: int | None
    rows: list[int] | None

    def __bool__(self) -> bool:
        return self.n is not None


def product(n: int | None, k: int | None, rows: str | None, model: str | None = None) -> Product:
    """What was given of them, if it goes together; --M may also be of a --model."""
    if (n is None) != (k is None):
        raise BadInput(f"--N and --K go together, got {'--K' if n is None else '--N'} alone")
    if rows is not None and n is None and model is None:
        raise BadInput(f"--M goes with --N and --K, got --M {rows} without them")
    return Product(n, k, None if rows is None else numbers("--M", rows))


def numbers(option: str, text: str) -> list[int]:
    """1,16,64: each once."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise BadInput(f"{option} must be whole numbers from 1 on, separated by commas, got {text!r}")
    return list(dict.fromkeys(map(int, parts)))


def chosen_cases(op: "Op", case: str | None, shapes: str | None, given: Product) -> "list[Case] | None":
    """By --case, by --shapes, by --N and --K, or None for the op's own."""
    from tilery.models.steps import PRODUCT_ROWS
    from tilery.workbench.shapes import cases, products

    if sum((case is not None, shapes is not None, bool(given))) > 1:
        raise BadInput("--case and --shapes exclude each other, and both exclude --N and --K; got more than one")
    if case is not None:
        return [parsed_case(op, case)]
    if given.n is not None and given.k is not None:
        return products(op, given.n, given.k, given.rows or PRODUCT_ROWS)
    return cases(op, shapes) if shapes is not None else None


def depth(screen: bool, rounds: int | None, turn_ms: float | None) -> "timing.Depth":
    """The protocol, or that of a screen, with what was asked for instead."""
    from tilery.measure import timing

    usual = timing.SCREEN if screen else timing.FULL
    return replace(usual, rounds=rounds or usual.rounds, turn_ms=turn_ms or usual.turn_ms)


def settled_shapes(shapes: str | None) -> str | None:
    """--shapes; a random set with its count and its seed, which is drawn here unless it was given."""
    from tilery.workbench.shapes import settled

    return settled(shapes)


def shapes_said(shapes: str | None) -> dict[str, str]:
    """What --json says of them."""
    return {} if shapes is None else {"shapes": shapes}


def shapes_title(shapes: str | None) -> str:
    """What a table's heading says of them."""
    return "" if shapes is None else f"; --shapes {shapes}"


def require_writable(path: Path | None) -> None:
    """Before an hour's work, not after it."""
    if path is not None and not path.absolute().parent.is_dir():
        raise BadInput(f"{path} must lie in a folder that is there, got {path.absolute().parent}")


@contextmanager
def progress(total: int | None = None) -> Iterator[Any]:
    """A bar on stderr; yields a function that says what is under way and one that counts and may be told the total.

    Where stderr is no terminal, as in a log, there is a line every half minute instead.
    """
    if not sys.stderr.isatty():
        yield _now_and_then(), lambda total=None: None
        return
    terminal = console(sys.stderr)
    shown = Progress(
        TextColumn("{task.description}", markup=False), BarColumn(bar_width=20), MofNCompleteColumn(),
        TimeElapsedColumn(), console=terminal, transient=True,
    )  # fmt: skip
    room = max(terminal.width - 45, 10)  # beside the bar, the count and the time
    with shown:
        task = shown.add_task("starting", total=total)
        yield (
            lambda text: shown.update(task, description=text[:room]),
            lambda total=total: shown.update(task, advance=1, total=total),
        )


def _now_and_then() -> Callable[[str], None]:
    began = last = time.monotonic()

    def say(text: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _LINE_EVERY_S:
            last = now
            print(f"tilery: {text}, after {now - began:.0f} s", file=sys.stderr, flush=True)

    return say


def print_json(rows: "Iterable[Row]", **more: Any) -> None:
    from tilery.measure.result import document

    print(json.dumps(document(rows, **more)))


def literal(text: str) -> str:
    """Not markup: "pip install 'tilery[cutile]'" keeps its brackets."""
    return escape(text)


def styled(status: str) -> str:
    return f"[{STYLE[status]}]{status}[/]"


def number(value: float | int | None, form: str = "") -> str:
    return "" if value is None else format(value, form)
