"""Are tuned entries still right, and as fast as they say? Measured again here, beside the candidates brought in."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from tilery import languages
from tilery.base.errors import BadTunedFile
from tilery.base.spec import Case
from tilery.core import policy, tuned
from tilery.core.cases import specs_for
from tilery.core.op import Op
from tilery.core.tuned_files import Entry
from tilery.hardware import device
from tilery.measure import timing
from tilery.measure.result import Row
from tilery.tuning import kept
from tilery.tuning.data import GOOD, Built, Candidate, Job, Measured, Problem
from tilery.tuning.pool import Pool
from tilery.tuning.record import Recorded
from tilery.tuning.search import Depths, Outcome

_SLOWER = 1.05  # times what was said; less is another day, not another speed
_ALIKE = 1.01  # of the best: as in a search, so that noise changes no winner
ENTRY, CANDIDATE, DEFAULT = "entry", "candidate", "default"


@dataclasses.dataclass
class Item:
    """An entry, a candidate from elsewhere or what would run untuned; then what was found of it."""

    kind: str
    entry: Entry
    path: Path
    measured: Measured | None = None
    built: Built = dataclasses.field(default_factory=Built)
    reason: str = ""  # why it was not measured
    refused: bool = False
    beaten: str = ""  # what is faster without being tuned

    @property
    def good(self) -> bool:
        return self.measured is not None and self.measured.status == GOOD

    @property
    def problems(self) -> list[str]:
        """What is the matter with an entry: nothing, if it may stay as it is."""
        if self.kind != ENTRY:
            return []
        found = [f"stale: {'; '.join(changed)}"] if (changed := tuned.stale(self.entry)) else []
        found += [f"refused: {self.reason}"] if self.refused else []
        if self.measured is not None:
            found += [_slower(self.entry, self.measured), self.beaten] if self.good else [_bad(self.measured)]
        return [each for each in found if each]


@dataclasses.dataclass
class Group:
    """All there is of one bucket on one device."""

    op: Op
    where: torch.device
    items: list[Item]
    case: Case | None = None
    specs: tuple[Any, ...] = ()

    @property
    def problem(self) -> Problem:
        assert self.case is not None, "nothing is measured without a case"
        return Problem(self.op.name, str(self.where), self.case)

    @property
    def sound(self) -> bool:
        return not any(item.problems for item in self.items)

    def rows(self) -> list[Row]:
        return [self._row(item) for item in self.items if item.kind != DEFAULT]

    def _row(self, item: Item) -> Row:
        problems, entry = item.problems, item.entry
        status = "fail" if problems else "refused" if item.refused else "pass" if item.good else "skipped"
        notes = [*problems, *([] if item.refused and problems else [item.reason])]
        if item.kind == CANDIDATE:
            notes.insert(0, f"candidate from {entry.origin}")
            notes += [_bad(item.measured)] if item.measured is not None else []
        case = str(self.case) if self.case is not None else _bucket(entry)
        row = Row(self.op.name, entry.kernel, case, status, "; ".join(filter(None, notes)))
        row.device, row.config = device.name(self.where), str(entry.config)
        if item.good and item.measured is not None:
            row.ms, row.error = item.measured.ms, item.measured.error
            row.ms_low, row.ms_high = timing.median_interval(item.measured.samples)
        return row


def _bucket(entry: Entry) -> str:
    return ",".join((*(f"{name}={value}" for name, value in entry.scaled.items()), entry.exact))


def _bad(found: Measured) -> str:
    return "" if found.status == GOOD else f"{found.status}: {found.reason}"


def _slower(entry: Entry, found: Measured) -> str:
    """Beyond both intervals and 5 %."""
    low, _ = timing.median_interval(found.samples)
    if low <= entry.interval[1] or found.ms <= _SLOWER * entry.ms:
        return ""
    return f"slower: {found.ms:.4g} ms, said {entry.ms:.4g} ({found.ms / entry.ms:.2f} times)"


def groups(ops: Iterable[Op]) -> list[Group]:
    """What there is for this machine's devices, bucket by bucket."""
    found = []
    for op in ops:
        for where in kept.here():
            slug = device.slug(where)
            path = tuned.candidates_folder() / op.name / f"{slug}.json"
            items = [Item(ENTRY, entry, of) for of, entry in kept.used(op, slug)]
            known = {(i.entry.bucket, i.entry.kernel, str(i.entry.config)) for i in items}
            brought = [e for e in tuned.read(path, op) if (e.bucket, e.kernel, str(e.config)) not in known]
            items += [Item(CANDIDATE, entry, path) for entry in brought]
            buckets = dict.fromkeys(item.entry.bucket for item in items)
            found += [Group(op, where, [i for i in items if i.entry.bucket == bucket]) for bucket in buckets]
    return found


def measure(group: Group, pool: Pool, progress: Callable[[str], None] = lambda _: None) -> None:
    """Checks and times all of a bucket in turns, and what would run there untuned. A worker for each of `here`."""
    _find_case(group)
    if group.case is None:
        for item in group.items:
            item.reason = item.reason or "not measured: it was tuned on a call's own arguments, which are not kept"
        return
    able = [item for item in group.items if not _refused(group, item)]
    if (untuned := _untuned(group)) is not None:
        same = (untuned.entry.kernel, untuned.entry.config)
        if known := [i for i in able if (i.entry.kernel, i.entry.config) == same]:
            untuned = known[0]
        else:
            group.items.append(untuned)
            able.append(untuned)
    if group.where.type == "cuda":  # elsewhere compilers say nothing of registers and spills
        _compile(group, able, pool)
    able = [item for item in able if item.measured is None]
    if not able:
        return
    asked = tuple(Candidate(i.entry.kernel, i.entry.config, i.entry.origin) for i in able)
    job = Job(group.problem, asked, Depths(group.where.type == "cuda").final())
    worker = pool.workers[kept.here().index(group.where)]
    answers = worker.measure(job, lambda candidate, what: progress(f"{group.problem}: {candidate or ''} {what}"))
    for item, answer in zip(able, answers, strict=True):
        item.measured = dataclasses.replace(answer, built=item.built)
    _note_beaten(group, untuned)


def _note_beaten(group: Group, untuned: Item | None) -> None:
    """Note where the entry that dispatch takes, the first by rank, is slower than what would run without it."""
    entries = [item for item in group.items if item.kind == ENTRY and item.good]
    taken = min(entries, key=lambda item: item.entry.rank, default=None)
    if taken is None or untuned is None or not untuned.good or _ratio_low(taken, untuned) <= _ALIKE:
        return
    slow, fast = _found(taken).ms, _found(untuned).ms
    taken.beaten = (
        f"slower than what runs untuned: {slow:.4g} ms, {untuned.entry.kernel} by default {fast:.4g} "
        f"({slow / fast:.2f} times)"
    )


def _compile(group: Group, items: list[Item], pool: Pool) -> None:
    """One that does not build or spills is not measured."""
    with ThreadPoolExecutor(pool.compilers) as threads:
        for item, built in zip(items, threads.map(lambda item: _built(group, item, pool), items)):
            item.built = built
            status = "does not build" if built.failure else "spills" if built.spills else GOOD
            if status != GOOD:
                candidate = Candidate(item.entry.kernel, item.entry.config, item.entry.origin)
                item.measured = Measured(
                    candidate, status, built.failure or f"{built.spills} bytes a thread", built=built
                )


def _built(group: Group, item: Item, pool: Pool) -> Built:
    config = tuned.config_of(group.op, item.entry, item.path)
    return pool.compile(group.op.name, item.entry.kernel, group.specs, device.arch(group.where), config)


def _find_case(group: Group) -> None:
    """The case that one of them was measured on, else one that the op knows of the same bucket."""
    for item in group.items:
        if item.entry.case is not None:
            try:
                group.specs = kept.specs_of(group.op, item.entry, item.path, group.where)
            except BadTunedFile as error:
                item.reason, item.refused = str(error), True
            else:
                group.case = Case(item.entry.case)
                return
    wanted = group.items[0].entry
    for case in _known(group.op):
        specs = specs_for(group.op, case, str(group.where))
        bucket = group.op.bucket(group.op.call(specs))
        if (bucket.exact, bucket.scaled) == (wanted.exact, wanted.scaled):
            group.case, group.specs = case, specs
            return


def _known(op: Op) -> Iterator[Case]:
    """The op's cases for timing: those for tests hold what it must refuse."""
    yield from (case for name, cases in op.cases.items() if name != "test" for case in cases)


def _refused(group: Group, item: Item) -> bool:
    if not item.refused:
        try:
            config = tuned.config_of(group.op, item.entry, item.path)
            item.entry = dataclasses.replace(item.entry, config=dataclasses.asdict(config))  # under the names of now
            item.reason = policy.refusal(group.op, item.entry.kernel, group.op.call(group.specs), config) or ""
        except BadTunedFile as error:
            item.reason = str(error)
        item.refused = bool(item.reason)
    return item.refused


def _untuned(group: Group) -> Item | None:
    """What dispatch would take without tuned data."""
    op, call = group.op, group.op.call(group.specs)
    ours = filter(languages.is_ours, op.asked(call))
    kernel = next((name for name in ours if policy.refusal(op, name, call) is None), None)
    if kernel is None:
        return None
    config = dataclasses.asdict(op.kernel(kernel).default(call))
    like = group.items[0].entry
    blank = dataclasses.replace(like, kernel=kernel, config=config, origin="", registers=None, spills=None)
    return Item(DEFAULT, blank, group.items[0].path)


# Mending


def fix(group: Group) -> bool:
    """Writes the bucket anew from what was measured: what is wrong is gone, times and versions are today's.

    False where nothing could be measured right, so that nothing may be said.
    """
    ranked = _ranked([item for item in group.items if item.good])
    if not ranked:
        return False
    outcome = Outcome((), tuple(_found(item) for item in ranked))
    recorded = Recorded(group.problem)
    tuned.write(group.op, recorded.slug, recorded.entries(outcome, group.op.kernels))
    return True


def _ranked(good: list[Item]) -> list[Item]:
    """The fastest, or the first in the old order that is alike; then the best of every other kernel."""
    by_time = sorted(good, key=lambda item: _found(item).ms)
    alike = [item for item in good if _ratio_low(item, by_time[0]) <= _ALIKE]
    ranked = alike[:1]
    for item in by_time:
        if all(item.entry.kernel != before.entry.kernel for before in ranked):
            ranked.append(item)
    return ranked


def _found(item: Item) -> Measured:
    assert item.measured is not None
    return item.measured


def _ratio_low(item: Item, best: Item) -> float:
    rounds = [mine / theirs for mine, theirs in zip(_found(item).samples, _found(best).samples)]
    return timing.median_interval(rounds)[0]
