"""What is kept of tuning: which files of tuned configs there are, and which entries dispatch chooses from."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from tilery.base import settings
from tilery.base.errors import BadTunedFile
from tilery.base.spec import Case
from tilery.core import tuned
from tilery.core.cases import specs_for
from tilery.core.op import REGISTRY, Op
from tilery.core.tuned_files import MEND, Entry
from tilery.hardware import device

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
