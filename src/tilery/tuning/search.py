"""Which candidate wins: short timings for many, long ones in turns for the last few. No processes, no clocks.

A search is a generator: it yields jobs, is sent what each found, and returns an Outcome. The same answers give the same
outcome. Every job begins with the reference, so that ratios to it compare candidates of different jobs.
"""

import dataclasses
import statistics
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tilery.base.errors import require
from tilery.measure import timing
from tilery.tuning.data import GOOD, Built, Candidate, Job, Measured, Problem

SEARCHES = ("halving", "exhaustive")
BITS = ("any", "stable")

_GROUP = 8  # candidates in a job of the first rung
_FINALISTS = 4
_ALIKE = 1.01  # times that differ by less are not worth telling apart
_STAYS = 1.02  # nor by this much, for what is tuned now: its own choice was such a close one, perhaps
_PERHAPS_ALIKE = 1.03  # after a short timing, where intervals overlap too
_MOST_FINALS = 3  # while it is in doubt who is alike, one more is played

Search = Generator[Job, list[Measured], "Outcome"]
Play = Generator[Job, list[Measured], None]


class Depths(NamedTuple):
    """On a GPU a turn lasts longer from rung to rung; on a CPU a turn is one call, and there are more rounds."""

    gpu: bool

    def rung(self, i: int) -> timing.Depth:
        if self.gpu:
            return timing.Depth(rounds=6, turn_ms=min(2.0 * 2**i, 10.0), warm_s=0.05, budget_s=20.0)
        return timing.Depth(rounds=min(6 * 2**i, 24), turn_ms=1.0, warm_s=0.0, budget_s=10.0)

    def final(self) -> timing.Depth:
        if self.gpu:
            return timing.Depth(rounds=12, turn_ms=10.0, warm_s=0.3, budget_s=30.0)
        return timing.Depth(rounds=24, turn_ms=1.0, warm_s=0.05, budget_s=20.0)


@dataclass(frozen=True)
class Gain:
    """How many times faster than the reference, with its 95 % interval."""

    ratio: float
    low: float
    high: float


@dataclass(frozen=True)
class Outcome:
    """What a search found: ranked[0] won, then the best of every other kernel. Nothing is ranked if nothing is good."""

    measured: tuple[Measured, ...]  # every candidate by its longest timing, in candidate order
    ranked: tuple[Measured, ...] = ()
    gain: Gain | None = None
    cut_short: bool = False  # time ran out: not every candidate was measured


@dataclass(frozen=True)
class Rules:
    """How to search. `built` waits for what a compiler says of the i-th candidate; `late` says that time is up."""

    built: Callable[[int], Built]
    late: Callable[[], bool] = lambda: False
    search: str = "halving"
    bits: str = "any"
    present: int | None = None  # what is tuned now: it plays the final, and stays unless another is clearly faster


def run(problem: Problem, candidates: Sequence[Candidate], rules: Rules) -> Search:
    require(rules.search in SEARCHES, f"search must be one of {', '.join(SEARCHES)}, got {rules.search!r}")
    require(rules.bits in BITS, f"bits must be one of {', '.join(BITS)}, got {rules.bits!r}")
    field = _Field(problem, candidates, rules)
    depths = Depths(torch.device(problem.device).type == "cuda")
    few = len(candidates) <= _FINALISTS
    yield from field.play_all(depths.final() if few or rules.search == "exhaustive" else depths.rung(0))
    if rules.search == "halving":
        yield from _halve(field, depths)
    finalists = field.eligible()
    while not few:
        finalists = field.leading(_FINALISTS)
        yield from field.play(finalists, depths.final())
        if not finalists or set(finalists) & set(field.eligible()):  # else those who are left play
            break
    for _ in range(_MOST_FINALS - 1):
        doubtful = field.doubtful(finalists)
        if not doubtful or rules.late():
            break
        yield from field.play(doubtful, depths.final(), again=True)
    return field.outcome(finalists)


def _halve(field: "_Field", depths: Depths) -> Play:
    """The better half plays again, twice as long, until few enough are left for the final."""
    left, rung = len(field.eligible()), 0
    while -(-left // 2) > _FINALISTS and not field.rules.late():
        left, rung = -(-left // 2), rung + 1
        yield from field.play(field.leading(left), depths.rung(rung))


class _Field:
    """The candidates of one problem, by their place in the order, and what is known of them so far."""

    def __init__(self, problem: Problem, candidates: Sequence[Candidate], rules: Rules) -> None:
        self.problem, self.candidates, self.rules = problem, candidates, rules
        self.found: dict[int, Measured] = {}  # the latest
        self.scores: dict[int, tuple[float, ...]] = {}  # of who is good: times slower than the reference, by rounds
        self.reference: int | None = None
        self.cut_short = False

    def play_all(self, depth: timing.Depth) -> Play:
        """In groups: one is measured while compilers work on the next."""
        places = list(range(len(self.candidates)))
        while places:
            if self.reference is not None and self.rules.late():
                self.cut_short = True
                return
            size = _GROUP if self.reference is None else _GROUP - 1
            group, places = places[:size], places[size:]
            yield from self.play([i for i in group if self._builds(i)], depth)

    def _builds(self, place: int) -> bool:
        candidate, built = self.candidates[place], self.rules.built(place)
        if built.failure:
            self.found[place] = Measured(candidate, "does not build", built.failure, built=built)
        elif built.spills:
            self.found[place] = Measured(candidate, "spills", f"{built.spills} bytes a thread", built=built)
        return place not in self.found

    def play(self, places: Sequence[int], depth: timing.Depth, again: bool = False) -> Play:
        """One job, the reference first. `again`: its rounds are added to those of the job before."""
        if not places:
            return
        first = [] if self.reference is None else [self.reference]
        places = [*first, *(i for i in sorted(places) if i not in first)]
        answers = yield Job(self.problem, tuple(self.candidates[i] for i in places), depth)
        assert [self.candidates[i] for i in places] == [m.candidate for m in answers], "answers to another job"
        good = [i for i, m in zip(places, answers) if m.status == GOOD]
        if self.reference is None and good:
            self.reference = good[0]
        # The worker holds all against the first good one: the reference, unless that failed here.
        base = statistics.median(self.scores[good[0]]) if good and good[0] in self.scores else 1.0
        for place, answer in zip(places, answers):
            self._learn(place, answer, base, again)
        if self.reference not in self.scores:
            self.reference = None  # it failed: the next job's first good one takes its place

    def _learn(self, place: int, answer: Measured, base: float, again: bool) -> None:
        before = self.scores.pop(place, ())
        if answer.status == GOOD:
            now = tuple(base * mine / first for mine, first in zip(answer.samples, answer.against, strict=True))
            self.scores[place] = before + now if again else now
        if again and answer.status == GOOD:
            known = self.found[place]
            answer = dataclasses.replace(
                answer, samples=known.samples + answer.samples, against=known.against + answer.against
            )
        self.found[place] = dataclasses.replace(answer, built=self.rules.built(place))

    def eligible(self) -> list[int]:
        """Who may win: good, and of the same bits where that was asked for."""
        good = sorted(self.scores)
        if self.rules.bits == "any":
            return good
        steady = [i for i in good if self.found[i].repeats]
        return [i for i in steady if self.found[i].digest == self.found[steady[0]].digest]

    def leading(self, count: int) -> list[int]:
        """The best so far, and what is tuned now. Who may equal the best is taken by turn: noise chooses nobody."""
        able = sorted(self.eligible(), key=self._median)
        if not able:
            return []
        least, high = self._median(able[0]), timing.median_interval(self.scores[able[0]])[1]

        def alike(i: int) -> bool:
            near = self._median(i) <= _PERHAPS_ALIKE * least and timing.median_interval(self.scores[i])[0] <= high
            return near or self._median(i) <= _ALIKE * least

        equals = [i for i in able if alike(i) or i == self.rules.present]
        return [*sorted(equals, key=self._turn), *(i for i in able if i not in equals)][:count]

    def _median(self, place: int) -> float:
        return statistics.median(self.scores[place])

    def _turn(self, place: int) -> tuple[bool, int]:
        """Among equals: what is tuned now, then candidate order."""
        return place != self.rules.present, place

    def _alike(self, place: int) -> float:
        return _STAYS if place == self.rules.present else _ALIKE

    def _contenders(self, finalists: Sequence[int]) -> dict[int, Gain]:
        """Finalists and the reference by turn, and how many times slower than the best of them each is."""
        able = [i for i in self.eligible() if i in finalists or i == self.reference]
        if not able:
            return {}
        best = min(able, key=self._median)
        return {i: _ratio(self.scores[i], self.scores[best]) for i in sorted(able, key=self._turn)}

    def doubtful(self, finalists: Sequence[int]) -> list[int]:
        """Who may or may not be alike with the best, and would win if so; with the best and who wins if not."""
        slower = self._contenders(finalists)
        in_doubt: list[int] = []
        for i, s in slower.items():
            alike = self._alike(i)
            if s.high <= alike:
                best = min(slower, key=self._median)
                return sorted({*in_doubt, best, i}) if in_doubt else []
            if s.low < alike:
                in_doubt.append(i)
        return []

    def outcome(self, finalists: Sequence[int]) -> Outcome:
        """The first by turn of those alike with the best; then the best of every other kernel."""
        slower = self._contenders(finalists)
        measured = tuple(self.found[i] for i in sorted(self.found))
        if not slower or self.reference is None:
            return Outcome(measured, cut_short=self.cut_short)
        winner = next(i for i, s in slower.items() if s.ratio <= self._alike(i) or s.low <= 1.0)
        ranked = {self.candidates[winner].kernel: winner}
        for i in sorted(self.eligible(), key=self._median):
            ranked.setdefault(self.candidates[i].kernel, i)
        gain = _ratio(self.scores.get(self.reference, self.scores[winner]), self.scores[winner])
        return Outcome(measured, tuple(self.found[i] for i in ranked.values()), gain, self.cut_short)


def _ratio(mine: Sequence[float], other: Sequence[float]) -> Gain:
    """Round by round, over the rounds that both played: who plays on has played the earlier ones too."""
    rounds = [a / b for a, b in zip(mine, other)]
    return Gain(statistics.median(rounds), *timing.median_interval(rounds))
