"""Tuned configs taken to another machine and brought from one, in files of ours or of SGLang's."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import torch

from tilery.base.errors import BadInput, BadTunedFile
from tilery.core import policy, tuned, tuned_files
from tilery.core.op import REGISTRY, Op
from tilery.core.tuned_files import Document, Entry
from tilery.hardware import device
from tilery.tuning import sglang
from tilery.tuning.kept import CANDIDATES, files, here, specs_of, used


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
