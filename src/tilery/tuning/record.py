"""What a tuner found, as it is kept: entries for dispatch, rows for the report."""

from collections.abc import Iterable
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from tilery.base.spec import Bucket
from tilery.core import tuned
from tilery.core.op import REGISTRY, Op
from tilery.core.tuned import Entry
from tilery.hardware import device
from tilery.measure import ceilings, timing
from tilery.measure.result import Row
from tilery.tuning import sglang
from tilery.tuning.candidates import dtype_of, specs_of
from tilery.tuning.data import GOOD, Candidate, Measured, Problem
from tilery.tuning.search import Outcome

_STATUS = {GOOD: "pass", "refused": "refused", "pruned": "skipped"}  # else fail


def present(op: Op, bucket: Bucket, where: torch.device) -> list[Entry]:
    """What is tuned now for exactly this bucket, the best first; the user's before what is shipped."""
    for path in tuned.files(op, device.slug(where)):
        entries = tuned.read(path, op)
        if found := [e for e in entries if (e.exact, e.scaled) == (bucket.exact, bucket.scaled)]:
            return sorted(found, key=lambda e: (e.rank, e.ms, e.kernel))
    return []


class Recorded:
    """A problem with what its op says of it."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.op, self.specs = problem, REGISTRY[problem.op], specs_of(problem)
        self.call = self.op.call(self.specs)
        self.where = torch.device(problem.device)
        self.slug, self.device = device.slug(self.where), device.name(self.where)
        self.bucket: Bucket = self.op.bucket(self.call)

    @property
    def name(self) -> str:
        """The case by its numbers; of a call, its bucket."""
        if self.problem.case is not None:
            return str(self.problem.case)
        return ",".join((*(f"{name}={value}" for name, value in self.bucket.scaled.items()), self.bucket.exact))

    @property
    def folder(self) -> Path | None:
        """Where its entries are kept, if not where dispatch looks."""
        return sglang.folder() if self.problem.use else None

    def present(self) -> list[Entry]:
        if not self.problem.use:
            return present(self.op, self.bucket, self.where)
        return [e for e in sglang.entries(self.slug) if (e.exact, e.scaled) == (self.bucket.exact, self.bucket.scaled)]

    def imported(self) -> list[Candidate]:
        """Configs from other devices for problems that differ from this in scaled parts alone.

        Those for SGLang may differ in the layout of scales too: its files do not say it.
        """
        known, wanted = tuned.candidates(self.op, self.slug), sglang.without_layout if self.problem.use else str
        return [
            Candidate(kernel, config, origin)
            for exact, _, kernel, config, origin in known
            if wanted(exact) == wanted(self.bucket.exact) and kernel in (self.problem.kernels or (kernel,))
        ]

    def roof_ms(self) -> float:
        return ceilings.ceilings(self.where).roof_ms(self.op.cost(self.call), dtype_of(self.specs))

    def entries(self, outcome: Outcome, kernels: Iterable[str]) -> list[Entry]:
        """The winner and those behind it; with what is kept of kernels that were not asked."""
        when = datetime.now(UTC).isoformat(timespec="seconds")
        new = [self._entry(found, when) for found in outcome.ranked]
        asked = set(kernels)
        others = [e for e in self.present() if e.kernel not in asked and e.kernel not in {n.kernel for n in new}]
        before = [e for e in others if new and e.ms < new[0].ms]
        ranked = [*before, *new, *(e for e in others if e not in before)]
        return [replace(entry, rank=rank) for rank, entry in enumerate(ranked)]

    def _entry(self, found: Measured, when: str) -> Entry:
        case = self.problem.case
        return Entry(
            kernel=found.candidate.kernel, exact=self.bucket.exact, scaled=self.bucket.scaled,
            config=found.candidate.config, ms=found.ms, interval=list(timing.median_interval(found.samples)),
            error=found.error, bit_identical=found.repeats, registers=found.built.registers,
            spills=found.built.spills, roof=self.roof_ms() / found.ms,
            versions=tuned.versions(found.candidate.kernel, self.where), device=self.device, when=when,
            origin=found.candidate.origin, case=None if case is None else dict(case.params),
        )  # fmt: skip

    def rows(self, outcome: Outcome, left_out: Iterable[Measured]) -> list[Row]:
        """Every candidate, for the landscape in the report."""
        ranks = {str(found.candidate): rank for rank, found in enumerate(outcome.ranked)}
        return [self.row(found, ranks.get(str(found.candidate))) for found in (*outcome.measured, *left_out)]

    def row(self, found: Measured, rank: int | None = None) -> Row:
        status = _STATUS.get(found.status, "fail")
        reason = found.reason if status in ("pass", "refused") else f"{found.status}: {found.reason}"
        row = Row(self.op.name, found.candidate.kernel, self.name, status, reason, self.device, stage="tune", rank=rank)
        row.registers, row.spills, row.shared = found.built.registers, found.built.spills, found.built.shared
        if found.candidate.config or found.status != "refused":  # a kernel that refuses the problem has no config
            kernel = self.op.kernel(found.candidate.kernel)
            row.config = f"Config({', '.join(f'{name}={value!r}' for name, value in found.candidate.config.items())})"
            row.default = asdict(kernel.default(self.call)) == found.candidate.config
        if found.status == GOOD:
            cost = self.op.cost(self.call)
            row.error, row.ms, row.samples, row.against = found.error, found.ms, found.samples, found.against
            row.ms_low, row.ms_high = timing.median_interval(found.samples)
            row.flops, row.bytes, row.dtype = cost.flops, cost.bytes, dtype_of(self.specs)
            row.gbps, row.tflops = cost.bytes / found.ms / 1e6, cost.flops / found.ms / 1e9
            row.roof = self.roof_ms() / found.ms
        return row
