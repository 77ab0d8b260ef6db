"""Tuned configs: which is used for a problem, and what is kept. Shipped beside the op, the user's over them."""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import torch

import tilery
from tilery import languages
from tilery.base import settings
from tilery.base.errors import BadTunedFile
from tilery.base.spec import Bucket
from tilery.core import tuned_files
from tilery.core.tuned_files import MEND
from tilery.core.tuned_files import Entry as Entry

if TYPE_CHECKING:
    from tilery.core.op import Op

Imported = tuple[str, dict[str, int], str, dict[str, Any], str]  # exact, scaled, kernel, config, origin
_listeners: list[Callable[[], None]] = []


def on_change(listener: Callable[[], None]) -> None:
    _listeners.append(listener)


def reload() -> None:
    """After a file changed: read it again and decide anew."""
    _read.cache_clear()
    for listener in _listeners:
        listener()


# Versions


def versions(kernel: str, where: torch.device) -> dict[str, str]:
    """What an entry is stamped with: a change of any makes it stale."""
    names = ["tilery", "torch", languages.language(kernel).name]
    names += ["cuda_runtime", "driver"] if where.type == "cuda" else []
    return {name: now for name in names if (now := _version(name)) is not None}


def stale(entry: Entry) -> list[str]:
    """What has another version than when it was measured."""
    return [
        f"{package} {then}, now {now}"
        for package, then in entry.versions.items()
        if (now := _version(package)) is not None and now != then
    ]


def source(entry: Entry) -> str:
    changed = stale(entry)
    return f"tuned (stale: {'; '.join(changed)})" if changed else "tuned"


def _version(package: str) -> str | None:
    """The version now of what an entry names; None for what is not here."""
    known = {"tilery": tilery.__version__, "torch": torch.__version__, "cuda_runtime": torch.version.cuda}
    lang = languages.LANGUAGES.get(package)
    return languages.version(lang) if lang else _driver() if package == "driver" else known.get(package)


@functools.cache
def _driver() -> str | None:
    told = Path("/proc/driver/nvidia/version")  # asked without waking a GPU
    return _driver_in(told.read_text(encoding="utf-8")) if told.exists() else None


def _driver_in(text: str) -> str | None:
    """It says "Kernel Module  535.54.03" or, of an open one, "Kernel Module for x86_64  580.82.07"."""
    match = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", text)
    return match.group(1) if match else None


# Reading


def files(op: "Op", slug: str) -> list[Path]:
    """The files of an op for a device, whether they are there or not: the user's, then the shipped one."""
    return [user_folder(op) / f"{slug}.json", op.folder / "tuned" / slug / f"{op.name}.json"]


def user_folder(op: "Op") -> Path:
    return settings.get().config_dir / op.name


def shipped(op: "Op") -> dict[str, Path]:
    """The op's shipped files by the devices' slugs."""
    return {path.parent.name: path for path in sorted((op.folder / "tuned").glob(f"*/{op.name}.json"))}


def read(path: Path, op: "Op") -> tuple[Entry, ...]:
    """The entries of an op's file, each of a kernel that the op has."""
    return _read(path, op)


@functools.lru_cache(maxsize=256)
def _read(path: Path, op: "Op") -> tuple[Entry, ...]:
    slug = path.parent.name if path.is_relative_to(op.folder) else path.stem  # of a shipped file, or of a user's
    found = tuned_files.read(path, op.name, slug)
    for entry in found:
        require_kernel(op, entry, path)
    return found


def require_kernel(op: "Op", entry: Entry, path: Path) -> None:
    if entry.kernel not in op.kernels:
        known = f"it has {', '.join(op.kernels)}"
        raise BadTunedFile(f"{path}:{entry.line}: {op.name} has no kernel {entry.kernel!r}, {known}; {MEND}")


def config_of(op: "Op", entry: Entry, path: Path) -> Any:
    """The kernel's Config of an entry's fields, under the names that they have now."""
    kind = op.kernel(entry.kernel).Config
    hints, fields = get_type_hints(kind), present_fields(kind, entry.config)
    try:
        made = kind(**fields)
        for name, value in fields.items():
            if isinstance(hints[name], type) and type(value) is not hints[name]:
                raise TypeError(f"{name} must be {hints[name].__name__}, got {value!r}")
    except (TypeError, ValueError) as error:
        what = f"{entry.kernel} has no config {entry.config}: {error}"
        raise BadTunedFile(f"{path}:{entry.line}: {what}; {MEND}") from None
    return made


def present_fields(kind: type, fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of a Config in a file that may be older than the names they have now.

    A Config's `old_names` are earlier names of its fields, its `old_values` earlier spellings of values, by field.
    """
    names, values = getattr(kind, "old_names", {}), getattr(kind, "old_values", {})
    found = {names.get(name, name): value for name, value in fields.items()}
    return {n: values[n].get(v, v) if n in values and isinstance(v, str) else v for n, v in found.items()}


def nearest(entries: Iterable[Entry], want: Bucket) -> list[Entry]:
    """Entries of the smallest bucket with the same exact part and no scaled value below the wanted, best first."""
    fits = [
        e for e in entries if e.exact == want.exact and all(e.scaled.get(k, -1) >= v for k, v in want.scaled.items())
    ]

    def distance(e: Entry) -> float:
        return sum(e.scaled[k] / max(v, 1) for k, v in want.scaled.items())

    least = min(map(distance, fits), default=0.0)
    return sorted((e for e in fits if distance(e) == least), key=lambda e: (e.rank, e.ms, e.kernel))


def found(op: "Op", want: Bucket, kernels: Iterable[str], slug: str) -> Iterator[tuple[Entry, Path]]:
    """Entries of these kernels for a bucket, the best first, each with its file; none where settings leave them out."""
    if not settings.get().tuned:
        return
    for path in files(op, slug):
        for entry in nearest((e for e in read(path, op) if e.kernel in kernels), want):
            yield entry, path


def with_config(op: "Op", entry: Entry, path: Path) -> Entry:
    """The entry, its config made of its fields."""
    return dataclasses.replace(entry, config=config_of(op, entry, path))


def candidates(op: "Op", slug: str) -> list[Imported]:
    """Configs tuned on other devices, for the tuner to try on this one."""
    path = candidates_folder() / op.name / f"{slug}.json"
    return [(e.exact, e.scaled, e.kernel, e.config, e.origin) for e in read(path, op)]


def candidates_folder() -> Path:
    return settings.get().config_dir / "candidates"


# Writing


def write(op: "Op", slug: str, entries: Iterable[Entry], folder: Path | None = None) -> Path:
    """Keeps these entries in the user's folder, or in `folder`: all that was there of their buckets is replaced."""
    path = (folder or settings.get().config_dir) / op.name / f"{slug}.json"
    tuned_files.merge(path, op.name, entries)
    reload()
    return path


def write_candidates(op: "Op", slug: str, entries: Iterable[Entry]) -> Path:
    """Keeps them for the tuner: those of the same device and bucket are replaced."""
    path = candidates_folder() / op.name / f"{slug}.json"
    tuned_files.merge(path, op.name, entries, same=lambda e: (e.origin, e.bucket))
    reload()
    return path
