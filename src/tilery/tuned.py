"""Tuned configs, the read side: shipped beside the op, the user's over them. JSON, never code.

One file per op and device: {"schema": 1, "op": ..., "device": ..., "entries": [Entry, ...]}.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import tilery
from tilery import backends, settings
from tilery.errors import BadTunedFile
from tilery.spec import Bucket

if TYPE_CHECKING:
    from tilery.op import Op

SCHEMA = 1
_MEND = "mend it or move it away"


@dataclasses.dataclass(frozen=True)
class Entry:
    """One measured winner, with its evidence."""

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
    versions: dict[str, str]  # driver, CUDA, language, tilery
    device: str
    when: str
    line: int = 0  # of the file, for errors; not in it

    @property
    def source(self) -> str:
        stale = [
            f"{package} {then}, now {now}"
            for package, then in self.versions.items()
            if (now := _version(package)) is not None and now != then
        ]
        return f"tuned (stale: {'; '.join(stale)})" if stale else "tuned"


def _version(package: str) -> str | None:
    """The version now of what an entry names; None for what cannot be asked without a driver."""
    known = {"tilery": tilery.__version__, "torch": torch.__version__, "cuda": torch.version.cuda}
    lang = backends.LANGUAGES.get(package)
    return backends.version(lang) if lang else known.get(package)


_FIELDS = {f.name for f in dataclasses.fields(Entry)} - {"line"}
_listeners: list[Callable[[], None]] = []


def on_change(listener: Callable[[], None]) -> None:
    _listeners.append(listener)


def reload() -> None:
    """After a file changed: read it again and decide anew."""
    _read.cache_clear()
    for listener in _listeners:
        listener()


def folders(op: "Op") -> list[Path]:
    """Where an op's files are, the strongest first."""
    return [settings.get().config_dir / op.name, op.folder / "tuned"]


@functools.lru_cache(maxsize=256)
def _read(path: Path) -> tuple[Entry, ...]:
    if not path.exists():
        return ()
    try:
        text = path.read_text(encoding="utf-8")
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise BadTunedFile(f"{path}:{error.lineno}: {error.msg}; {_MEND}") from None
    except (UnicodeDecodeError, OSError) as error:
        raise BadTunedFile(f"{path}:1: {error}; {_MEND}") from None
    if (
        not isinstance(document, dict)
        or document.get("schema") != SCHEMA
        or not isinstance(document.get("entries"), list)
    ):
        raise BadTunedFile(f'{path}:1: expected {{"schema": {SCHEMA}, "entries": [...]}}; {_MEND}')
    lines = [_line_of(text, i) for i in range(len(document["entries"]))]
    return tuple(_entry(found, f"{path}:{line}", line) for found, line in zip(document["entries"], lines))


def _entry(found: Any, where: str, line: int) -> Entry:
    given = set(found) if isinstance(found, dict) else set()
    if given != _FIELDS:
        missing, unknown = sorted(_FIELDS - given), sorted(given - _FIELDS)
        raise BadTunedFile(f"{where}: entry lacks {missing}, has unknown {unknown}; {_MEND}")
    for name, kind in (("kernel", str), ("exact", str), ("scaled", dict), ("config", dict), ("versions", dict)):
        if not isinstance(found[name], kind):
            raise BadTunedFile(f"{where}: {name} must be {kind.__name__}, got {found[name]!r}; {_MEND}")
    for name, value in (("ms", found["ms"]), *((f"scaled {k}", v) for k, v in found["scaled"].items())):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise BadTunedFile(f"{where}: {name} must be a number, got {value!r}; {_MEND}")
    return Entry(**found, line=line)


def _line_of(text: str, index: int) -> int:
    """The line on which the index-th entry starts."""
    decoder, at = json.JSONDecoder(), text.index("[", text.index('"entries"')) + 1
    for step in range(index + 1):
        while text[at] in " \n\r\t,":
            at += 1
        if step < index:
            _, at = decoder.raw_decode(text, at)
    return text.count("\n", 0, at) + 1


def nearest(entries: Iterable[Entry], want: Bucket) -> list[Entry]:
    """Entries of the smallest bucket with the same exact part and no scaled value below the wanted, fastest first."""
    fits = [
        e for e in entries if e.exact == want.exact and all(e.scaled.get(k, -1) >= v for k, v in want.scaled.items())
    ]

    def distance(e: Entry) -> float:
        return sum(e.scaled[k] / max(v, 1) for k, v in want.scaled.items())

    least = min(map(distance, fits), default=0.0)
    return sorted((e for e in fits if distance(e) == least), key=lambda e: (e.ms, e.kernel))


def best(
    op: "Op", specs: tuple[Any, ...], kernels: tuple[str, ...], able: Callable[[str], bool], slug: str
) -> Entry | None:
    """The fastest tuned entry among these kernels, its config made and asked again: strides may not bear it."""
    from tilery import dispatch

    want = op.bucket(*specs)
    for folder in folders(op):
        path = folder / f"{slug}.json"
        for entry in nearest((e for e in _read(path) if e.kernel in kernels), want):
            if not able(entry.kernel):
                continue
            try:
                config = op.kernel(entry.kernel).Config(**entry.config)
            except TypeError as error:
                what = f"{entry.kernel} has no config {entry.config}: {error}"
                raise BadTunedFile(f"{path}:{entry.line}: {what}; {_MEND}") from None
            if dispatch.problem_refusal(op, entry.kernel, specs, config) is None:
                return dataclasses.replace(entry, config=config)
    return None
