"""Commands that the documents print, and whether the command line takes them; no verb is run to its end.

A synopsis is written with `[…]` for what may be left out, `a|b` for a choice, capitals or `<…>` for what a reader
fills in, and `…` for more of the same. `variants` makes plain commands of it: one with nothing optional, and one for
each choice of each bracket.
"""

import argparse
import importlib
import importlib.util
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import typer.main

from tilery.base.errors import ToolMissing
from tilery.cli import app

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "results/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]

# What a reader fills in, as a word of its own.
FILLED = {
    "N": "7", "OP": "matmul", "<op>": "matmul", "B": "triton", "<language>": "triton", "SET": "llama-8b", "RUN": "last",
    "RUNG": "naive", "A": "last", "FILE": "file.json", "FILE.svg": "file.svg", "FILE.html": "file.html",
    "FILE.csv": "file.csv", "FOLDER": "folder",
    "TEXT": "word", "PROMPT.txt": "README.md",
}  # fmt: skip
# The value of an option that a document leaves out as `…`.
LEFT_OUT = {"--case": "m=64,n=4096,k=8192,dtype=bf16", "--N": "4096", "--K": "8192", "--csv": "file.csv"}

# Where a verb has taken all its options and begins its work. A verb that is not here is parsed alone.
WORK = (
    "tilery.workbench.run.run", "tilery.ladder.run.run", "tilery.measure.check.rows", "tilery.tuning.request.pool_for",
    "tilery.workbench.sanitize.rows", "tilery.pages.summary.collect", "tilery.pages.compare.compare",
    "tilery.measure.compile.Compiler.compile", "tilery.measure.inspect.source", "tilery.models.plan.plans",
    "tilery.patch.infer.infer",
)  # fmt: skip
RUN_UP_TO_ITS_WORK = ("bench", "ladder", "check", "tune", "sanitize", "report", "plot", "show", "plan", "infer")


class Command(NamedTuple):
    document: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}: {self.text}"


class Refused(Exception):
    """What the command line says of a command that it does not take."""


class Begun(BaseException):
    """A verb took its options."""


def in_documents() -> list[Command]:
    return [command for document in DOCUMENTS for command in in_text(document.read_text(encoding="utf-8"), document)]


def in_text(text: str, document: Path = ROOT / "README.md") -> list[Command]:
    """Commands in fences, a line each, and in inline code."""
    found = []
    fences = list(re.finditer(r"^ *```\w*\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL))
    for fence in fences:
        for line in re.finditer(r".+", fence[1]):
            for part in line[0].split("&&"):
                found.append((fence.start(1) + line.start(), part))
    spaces = lambda match: re.sub(r"[^\n]", " ", match[0])  # noqa: E731
    prose = re.sub(r"^ *```\w*\n(.*?)^ *```$", spaces, text, flags=re.MULTILINE | re.DOTALL)
    found += [(code.start(), code[1]) for code in re.finditer(r"`([^`]+)`", prose)]
    told = ((text.count("\n", 0, at) + 1, _plain(part)) for at, part in sorted(found))
    return [Command(document, line, part) for line, part in told if is_command(part)]


def _plain(text: str) -> str:
    """A command without assignments before it, and without a redirection, comment or explanation behind it."""
    text = re.sub(r"\s*\n\s*", " ", text.strip()).replace(".venv/bin/", "")
    text = re.sub(r"^(?:[A-Z_]+=\S+ )+", "", text)
    return re.split(r" {2,}| # | > ", text)[0].strip()


def is_command(text: str) -> bool:
    return bool(re.match(r"tilery [a-z\[]|python3? (?:benchmarks|examples)/", text))


def variants(text: str) -> list[str]:
    """Plain commands of a synopsis."""
    plain = [made for each in _without_brackets(text) for made in _one_of_each_choice(each)]
    return list(dict.fromkeys(map(_filled, plain)))


def _without_brackets(text: str) -> list[str]:
    """One without any bracket; then one for each choice of each bracket, with the operands: `[OP…]`."""
    parts = _split(text)
    groups = [i for i, part in enumerate(parts) if part.startswith("[")]
    operands = {i for i in groups if parts[i][1:2].isupper()}

    def made(chosen: dict[int, str]) -> str:
        return " ".join(chosen.get(i, "") if i in groups else part for i, part in enumerate(parts))

    given = {i: parts[i][1:-1] for i in operands}
    found = [made({})]
    for i in groups:
        for choice in _split(parts[i][1:-1], at=" | "):
            found += [made(given | {i: inner}) for inner in _without_brackets(choice)]
    return found


def _split(text: str, at: str | None = None) -> list[str]:
    """At `at` outside of brackets; without it into brackets and what stands between them."""
    parts, depth = [""], 0
    for i, letter in enumerate(text):
        depth -= letter == "]"
        if at and not depth and text.startswith(at, i):
            parts.append("")
        if not at and letter == "[" and not depth:
            parts.append("")
        parts[-1] += letter
        if not at and letter == "]" and not depth:
            parts.append("")
        depth += letter == "["
    return [part.removeprefix(at).strip() for part in parts] if at else [part.strip() for part in parts]


def _one_of_each_choice(text: str) -> list[str]:
    """`--weights bf16|fp8`: the first of each, then every other one in turn."""
    words = text.split()
    first = [word.split("|")[0] for word in words]
    others = [[*first[:i], choice, *first[i + 1 :]] for i, word in enumerate(words) for choice in word.split("|")[1:]]
    return [" ".join(each) for each in [first, *others]]


def _filled(text: str) -> str:
    words: list[str] = []
    for word in text.split():
        if word == "…":
            word = LEFT_OUT[words[-1]]
        word = word.replace("=…", "=128").removesuffix("…")
        words.append(FILLED.get(word, word))
    return " ".join(words)


def require_taken(text: str, monkeypatch) -> None:
    """Raise Refused unless the command line takes a plain command."""
    program, *words = shlex.split(text)
    if program == "tilery":
        _require_taken_by_verb(words, monkeypatch)
    else:
        _require_taken_by_script(words)


def _require_taken_by_verb(words: list[str], monkeypatch) -> None:
    command, verb = typer.main.get_command(app), ""
    while hasattr(command, "commands"):  # a group
        if verb and not words:
            return  # `tilery runs`, `tilery configs`: their own list
        if not words or words[0] not in command.commands:
            raise Refused(f"expected one of {', '.join(command.commands)}, got {' '.join(words)!r}")
        verb, *words = words
        command = command.commands[verb]
    if not words:
        return  # the name of a verb: it needs no argument to be named
    try:
        parsed = command.make_context(verb, list(words))
        if verb in RUN_UP_TO_ITS_WORK:
            _stop_before_work(monkeypatch)
            parsed.command.invoke(parsed)
    except Begun:
        pass
    except ToolMissing:
        pass  # it is a matter of this machine
    except Exception as error:
        raise Refused(getattr(error, "message", None) or str(error)) from error


def _stop_before_work(monkeypatch) -> None:
    def begin(*args, **kwargs):
        raise Begun

    for where in WORK:
        module, _, name = where.rpartition(".")
        try:
            owner = importlib.import_module(module)
        except ModuleNotFoundError:  # a method
            outer, _, kind = module.rpartition(".")
            owner = getattr(importlib.import_module(outer), kind)
        monkeypatch.setattr(owner, name, begin)


def _require_taken_by_script(words: list[str]) -> None:
    path = ROOT / words[0]
    if not path.is_file():
        raise Refused(f"expected a script of this repository, got {words[0]}")
    if len(words) == 1:
        return  # the name of a script
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    parser: argparse.ArgumentParser = module.parser()
    parser.exit_on_error = False
    parser.error = _refuse
    try:
        parser.parse_args(words[1:])
    except (argparse.ArgumentError, ValueError) as error:
        raise Refused(str(error)) from error


def _refuse(message: str) -> None:
    raise Refused(message)
