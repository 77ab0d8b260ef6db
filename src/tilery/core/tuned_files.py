"""Files of tuned configs: read and checked, merged under a lock, replaced whole. docs/tuned.md says what they hold.

One file per op and device: {"schema": 1, "op": ..., "device": ..., "entries": [Entry, ...]}, an entry a line.
An export holds several of them: {"schema": 1, "files": [...]}.
"""

import contextlib
import dataclasses
import json
import os
import re
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator
from pathlib import Path
from typing import Any

import filelock

from tilery.base import files
from tilery.base.errors import BadTunedFile

SCHEMA = 1
MEND = "mend it or move it away"
_WAIT_S = 60  # for another process that writes the same file; writing takes milliseconds


@dataclasses.dataclass(frozen=True)
class Entry:
    """One measured candidate, with its evidence: the winner of its bucket, or a runner-up."""

    kernel: str
    exact: str  # the op's bucket: must be the same
    scaled: dict[str, int]  # may be larger than the problem
    config: Any  # a dict in the file, the kernel's Config once chosen
    ms: float  # median
    interval: list[float]  # 95 % of the median, ms
    error: float  # against float64
    bit_identical: bool  # two runs gave the same bits
    registers: int | None
    spills: int | None
    roof: float  # share of the roofline reached
    versions: dict[str, str]  # driver, CUDA, torch, language, tilery
    device: str  # where it was measured
    when: str
    rank: int = 0  # 0 is the winner of its bucket
    origin: str = ""  # the device that an imported config was tuned for; empty for one that was found here
    case: dict[str, Any] | None = None  # the case it was measured on; None for a call's own arguments
    line: int = 0  # of the file, for errors; not in it

    @property
    def bucket(self) -> tuple[Hashable, ...]:
        return self.exact, *sorted(self.scaled.items())


@dataclasses.dataclass(frozen=True)
class Document:
    """What was tuned of one op on one device."""

    op: str
    device: str  # its slug
    entries: tuple[Entry, ...]
    line: int = 1  # of the file; not in it


_TEXT, _FLAG, _DICT, _LIST = ("str", (str,)), ("true or false", (bool,)), ("dict", (dict,)), ("list", (list,))
_NUMBER, _WHOLE = ("a number", (int, float)), ("a whole number", (int,))
_KINDS: dict[str, tuple[str, tuple[type, ...]]] = {
    "kernel": _TEXT, "exact": _TEXT, "scaled": _DICT, "config": _DICT, "ms": _NUMBER, "interval": _LIST,
    "error": _NUMBER, "bit_identical": _FLAG, "registers": ("a whole number or null", (int, type(None))),
    "spills": ("a whole number or null", (int, type(None))), "roof": _NUMBER, "versions": _DICT, "device": _TEXT,
    "when": _TEXT, "rank": _WHOLE, "origin": _TEXT, "case": ("dict or null", (dict, type(None))),
}  # fmt: skip
_SHAPE = f'{{"schema": {SCHEMA}, "op": ..., "device": ..., "entries": [...]}}'


# Reading


def read(path: Path, op: str, device: str) -> tuple[Entry, ...]:
    """The entries of a file, which must be this op's on this device; none where there is no file."""
    try:
        found = documents(path)
    except FileNotFoundError:
        return ()
    if [(d.op, d.device) for d in found] != [(op, device)]:
        came = ", ".join(f"{d.op} on {d.device}" for d in found) or "none"
        what = f"expected the entries of {op} on {device}, got those of {came}"
        raise BadTunedFile(f"{path}:1: {what}; move it away, then `tilery configs import` brings it in")
    return found[0].entries


def documents(path: Path) -> list[Document]:
    """What a file holds: one of an op and a device, or all of an export."""
    text, found = load(path)
    several = isinstance(found, dict) and set(found) == {"schema", "files"} and isinstance(found["files"], list)
    if several and found["schema"] != SCHEMA:
        raise BadTunedFile(f'{path}:1: expected "schema": {SCHEMA}, got {found["schema"]!r}; {MEND}')
    parts, lines = found["files"] if several else [found], _entry_lines(text)
    for each in parts:
        _require_shape(each, path)
    return [
        Document(
            each["op"], each["device"], tuple(_entry(e, path, line) for e, line in zip(each["entries"], starts)), first
        )
        for each, (first, starts) in zip(parts, lines)
    ]


def load(path: Path) -> tuple[str, Any]:
    """A JSON file as it stands and what it means; a field that stands twice is an error."""
    try:
        text = path.read_text(encoding="utf-8")
        return text, json.loads(text, object_pairs_hook=_without_twins)
    except FileNotFoundError:
        raise
    except NotADirectoryError as error:  # no file lies below a file
        raise FileNotFoundError(error.errno, error.strerror, str(path)) from None
    except PermissionError as error:
        if os.access(path.parent, os.X_OK):
            raise BadTunedFile(f"{path}:1: {error}; {MEND}") from None
        warnings.warn(f"no tuned configs are read from {path.parent}: {error.strerror}", stacklevel=2)
        raise FileNotFoundError(error.errno, error.strerror, str(path)) from None
    except json.JSONDecodeError as error:
        raise BadTunedFile(f"{path}:{error.lineno}: {error.msg}; {MEND}") from None
    except (ValueError, OSError) as error:
        raise BadTunedFile(f"{path}:1: {error}; {MEND}") from None


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the field {next(n for n in names if names.count(n) > 1)!r} stands twice")
    return made


def _require_shape(found: Any, path: Path) -> None:
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        came = f"schema {found.get('schema')!r}" if isinstance(found, dict) else type(found).__name__
        raise BadTunedFile(f"{path}:1: expected {_SHAPE}, got {came}; {MEND}")
    fields = {"schema", "op", "device", "entries"}
    lacks, unknown = sorted(fields - set(found)), sorted(set(found) - fields)
    if lacks or unknown:
        raise BadTunedFile(f"{path}:1: expected {_SHAPE}, lacks {lacks}, has unknown {unknown}; {MEND}")
    for name, kind in (("op", str), ("device", str), ("entries", list)):
        if not isinstance(found[name], kind):
            raise BadTunedFile(f"{path}:1: {name} must be {kind.__name__}, got {found[name]!r}; {MEND}")


def _entry(found: Any, path: Path, line: int) -> Entry:
    where, given = f"{path}:{line}", set(found) if isinstance(found, dict) else set()
    if given != set(_KINDS):
        missing, unknown = sorted(set(_KINDS) - given), sorted(given - set(_KINDS))
        raise BadTunedFile(f"{where}: entry lacks {missing}, has unknown {unknown}; {MEND}")
    _require_kinds(where, [(name, found[name], *kind) for name, kind in _KINDS.items()])
    _require_kinds(where, [(f"scaled {name}", value, *_WHOLE) for name, value in found["scaled"].items()])
    _require_kinds(where, [(f"version of {name}", value, *_TEXT) for name, value in found["versions"].items()])
    _require_kinds(where, [("a bound of interval", value, *_NUMBER) for value in found["interval"]])
    if len(found["interval"]) != 2:
        raise BadTunedFile(f"{where}: interval must be [low, high], got {found['interval']}; {MEND}")
    return Entry(**found, line=line)


def _require_kinds(where: str, values: list[tuple[str, Any, str, tuple[type, ...]]]) -> None:
    for name, value, said, kinds in values:
        if type(value) not in kinds:  # not isinstance: true is an int to Python
            raise BadTunedFile(f"{where}: {name} must be {said}, got {value!r}; {MEND}")


def _entry_lines(text: str) -> list[tuple[int, list[int]]]:
    """For every list of entries the line on which it starts, and those on which its entries do."""
    decoder, opening, space = json.JSONDecoder(), re.compile(r'"entries"\s*:\s*\['), re.compile(r"[\s,]*")
    found: list[tuple[int, list[int]]] = []
    at, seen, line = 0, 0, 1
    while match := opening.search(text, at):
        at = match.end()
        starts: list[int] = []
        line, seen = line + text.count("\n", seen, at), at
        found.append((line, starts))
        while text[(at := space.match(text, at).end())] != "]":  # type: ignore[union-attr]  # matches always
            line, seen = line + text.count("\n", seen, at), at
            starts.append(line)
            _, at = decoder.raw_decode(text, at)
    return found


# Writing


def merge(
    path: Path, op: str, entries: Iterable[Entry], same: Callable[[Entry], Hashable] = lambda e: e.bucket
) -> None:
    """Replaces what the file holds of the same as these entries, and keeps the rest. A corrupt file stays as it is."""
    new = [_entry(json.loads(json.dumps(_plain(e))), path, 0) for e in entries]  # what could not be read is not written
    replaced = {same(e) for e in new}
    with _alone(path):
        kept = [e for e in read(path, op, path.stem) if same(e) not in replaced]
        files.replace(path, text_of(Document(op, path.stem, (*kept, *new))))


def write_export(path: Path, found: Iterable[Document]) -> None:
    inner = ",\n".join(text_of(each).rstrip() for each in found)
    write_text(path, f'{{"schema": {SCHEMA}, "files": [\n{inner}\n]}}\n')


def write_text(path: Path, text: str) -> None:
    """Writes all of it or nothing, in a folder that is made if it is not there."""
    with files.writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace(path, text)


def text_of(found: Document) -> str:
    """An entry a line, in an order of its own: the same entries give the same text."""
    ordered = sorted(found.entries, key=lambda e: (e.exact, sorted(e.scaled.items()), e.origin, e.rank, e.kernel))
    lines = ",\n".join(json.dumps(_plain(e), allow_nan=False) for e in ordered)
    head = f'"schema": {SCHEMA}, "op": {json.dumps(found.op)}, "device": {json.dumps(found.device)}'
    return f'{{{head}, "entries": [\n{lines}\n]}}\n'


def _plain(entry: Entry) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(entry).items() if name in _KINDS}


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Holds the file's lock; what goes wrong with the disk is said, and the old file is whole."""
    with files.writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with filelock.FileLock(path.with_name(f".{path.name}.lock"), timeout=_WAIT_S):
                yield
        except filelock.Timeout:
            why = f"another process holds its lock, .{path.name}.lock, for more than {_WAIT_S} s"
            raise files.not_written(path, why, hint="end that process, or wait for it") from None
