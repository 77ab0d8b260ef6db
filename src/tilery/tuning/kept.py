"""What is kept of tuning: which files there are, taking them elsewhere, and bringing in those of another machine."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from tilery.base import settings
from tilery.base.errors import BadInput, BadTunedFile
from tilery.base.spec import Case
from tilery.core import policy, tuned, tuned_files
from tilery.core.cases import specs_for
from tilery.core.op import REGISTRY, Op
from tilery.core.tuned_files import MEND, Document, Entry
from tilery.hardware import device
from tilery.tuning import sglang

YOURS, SHIPPED, CANDIDATES = "yours", "shipped", "candidates"


@dataclasses.dataclass(frozen=True)
class File:
    """A file of tuned configs; `failure` says why it cannot be read."""

    op: str
    device: str
    path: Path
    owner: str  # YOURS, SHIPPED or CANDIDATES
    entries: tuple[Entry, ...] = ()
    failure: str = ""

    @property
    def buckets(self) -> int:
        return len({entry.bucket for entry in self.entries})

    @property
    def stale(self) -> list[Entry]:
        return [entry for entry in self.entries if tuned.stale(entry)]


def files(ops: Iterable[Op]) -> list[File]:
    """Every file there is of these ops, the strongest first; one that cannot be read is among them and says so."""
    found = []
    for op in ops:
        owners = {
            YOURS: _by_slug(tuned.user_folder(op)),
            SHIPPED: tuned.shipped(op),
            CANDIDATES: _by_slug(tuned.candidates_folder() / op.name),
        }
        for owner, slug, path in ((owner, *each) for owner, paths in owners.items() for each in paths.items()):
            try:
                found.append(File(op.name, slug, path, owner, tuned.read(path, op)))
            except BadTunedFile as error:
                found.append(File(op.name, slug, path, owner, failure=str(error)))
    return found


def _by_slug(folder: Path) -> dict[str, Path]:
    return {path.stem: path for path in sorted(folder.glob("*.json"))}


def strangers() -> list[Path]:
    """The user's files of ops that are not here: of a plug-in that is not installed, say."""
    folder = settings.get().config_dir
    found = [*folder.glob("*/*.json"), *tuned.candidates_folder().glob("*/*.json")]
    return sorted(path for path in found if path.parent.name not in REGISTRY)


def used(op: Op, slug: str) -> list[tuple[Path, Entry]]:
    """What dispatch chooses from on a device, with its files: shipped buckets stand back behind the user's."""
    found: list[tuple[Path, Entry]] = []
    for path in tuned.files(op, slug):
        taken = {entry.bucket for _, entry in found}
        found += [(path, entry) for entry in tuned.read(path, op) if entry.bucket not in taken]
    return found


def here() -> list[torch.device]:
    """The devices of this machine that are tuned for: its CPU, and the GPU that torch takes."""
    return list(dict.fromkeys((torch.device("cpu"), device.default())))


# Elsewhere


def export(path: Path, ops: Iterable[Op], slug: str | None = None) -> list[Document]:
    """Writes what is used of these ops, on one device or on all there are, into one file."""
    chosen = list(ops)
    slugs = {(f.op, f.device) for f in files(chosen) if f.owner != CANDIDATES}
    found = [
        Document(op.name, name, tuple(entry for _, entry in used(op, name)))
        for op in chosen
        for name in sorted(name for of, name in slugs if of == op.name)
        if slug in (None, name)
    ]
    if not any(each.entries for each in found):
        where = f" on {slug}" if slug else ""
        raise BadInput(f"nothing is tuned of {', '.join(op.name for op in chosen)}{where}; `tilery configs` lists all")
    tuned_files.write_export(path, found)
    return found


@dataclasses.dataclass(frozen=True)
class Brought:
    """What became of one entry of an import: "entry", "candidate" or "refused"."""

    op: str
    device: str  # where it was tuned
    entry: Entry
    kept_as: str
    reason: str = ""


def bring(given: Path | None, as_candidates: bool = False) -> list[Brought]:
    """Entries of this machine's devices become entries, those of others candidates. Nothing is kept of a bad file.

    Those of SGLang's files, which hold no evidence, are always candidates.
    """
    import tilery.ops  # noqa: F401  fills the registry

    brought: list[Brought] = []
    to_write: list[tuple[Op, str, str, list[Entry]]] = []
    for path, each, measured in [found for file in sglang.files(given) for found in _documents(file)]:
        if each.op not in REGISTRY:
            raise BadTunedFile(f"{path}:{each.line}: there is no op {each.op!r}, only {', '.join(sorted(REGISTRY))}")
        op, where = REGISTRY[each.op], _device_like(each.device)
        here_too = where is not None and device.slug(where) == each.device
        ours = here_too and measured and not as_candidates
        judged = [
            _judged(op, each.device, entry, path, where, "entry" if ours else "candidate") for entry in each.entries
        ]
        brought += judged
        kept = [b.entry for b in judged if b.kept_as != "refused"]
        if kept and where is not None:
            to_write.append((op, device.slug(where), "entry" if ours else "candidate", kept))
    for op, slug, kind, kept in to_write:
        (tuned.write if kind == "entry" else tuned.write_candidates)(op, slug, kept)
    return brought


def _documents(path: Path) -> list[tuple[Path, Document, bool]]:
    """What a file holds, and whether it was measured by us."""
    if sglang.is_one(path):
        return [(path, sglang.document(path), False)]
    try:
        return [(path, each, True) for each in tuned_files.documents(path)]
    except FileNotFoundError:
        raise BadInput(f"FILE must be an export or a file of tuned configs, got {path}, which is not there") from None


def _device_like(slug: str) -> torch.device | None:
    """The device of this machine that the configs of another are tried on: a CPU's on its CPU, a GPU's on its GPU."""
    cpu = slug.startswith("cpu_")
    return next((where for where in here() if (where.type == "cpu") == cpu), None)


def _judged(op: Op, slug: str, entry: Entry, path: Path, where: torch.device | None, kind: str) -> Brought:
    tuned.require_kernel(op, entry, path)
    if kind == "candidate":
        entry = dataclasses.replace(entry, origin=entry.device)
    if where is None:
        return Brought(op.name, slug, entry, "refused", "needs a GPU, and this machine has none")
    why = refusal(op, entry, path, where)
    return Brought(op.name, slug, entry, kind if why is None else "refused", why or "")


def refusal(op: Op, entry: Entry, path: Path, where: torch.device) -> str | None:
    """Why an entry cannot run on this device. What its case says of the problem is asked too, where there is one."""
    if why := policy.environment_refusal(op, entry.kernel, where):
        return why
    config = tuned.config_of(op, entry, path)
    if entry.case is None:
        return None
    return policy.problem_refusal(op, entry.kernel, op.call(specs_of(op, entry, path, where)), config)


def specs_of(op: Op, entry: Entry, path: Path, where: torch.device) -> tuple[Any, ...]:
    """The specs of an entry's case, which must be one of its bucket."""
    assert entry.case is not None
    try:
        specs = specs_for(op, Case(entry.case), str(where))
        bucket = op.bucket(op.call(specs))
    except (TypeError, ValueError) as error:
        raise BadTunedFile(f"{path}:{entry.line}: {op.name} has no case {entry.case}: {error}; {MEND}") from None
    if (bucket.exact, bucket.scaled) != (entry.exact, entry.scaled):
        what = f"its case is of {bucket.exact} {bucket.scaled}, the entry says {entry.exact} {entry.scaled}"
        raise BadTunedFile(f"{path}:{entry.line}: {what}; {MEND}")
    return specs
