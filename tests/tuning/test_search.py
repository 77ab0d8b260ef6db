"""Who wins, from given timings: failures never, ties always the same one, noise nobody."""

import dataclasses
import random

import pytest
from fakes import FakeWorker, candidates

from tilery.base.errors import BadInput
from tilery.base.spec import case
from tilery.tuning import search
from tilery.tuning.data import Built, Problem
from tilery.tuning.search import Depths, Rules

PROBLEM = Problem("softmax", "cuda:0", case(m=1))


def played(worker, field, built=None, **rules):
    """The outcome, when `worker` answers all jobs."""
    playing = search.run(PROBLEM, field, Rules(lambda i: (built or {}).get(str(field[i]), Built()), **rules))
    try:
        job = next(playing)
        while True:
            job = playing.send(worker.measure(job))
    except StopIteration as end:
        return end.value


def slow_but(fast, ms=1.0):
    return lambda candidate: ms if candidate == fast else 2.0 + candidate.config["tile"] / 100


def winner(outcome):
    return outcome.ranked[0].candidate


@pytest.mark.parametrize("how", search.SEARCHES)
@pytest.mark.parametrize("count", [1, 3, 8, 9, 40])
def test_the_fastest_wins_wherever_it_stands(how, count):
    field = candidates(count)
    for place in {0, count // 2, count - 1}:
        outcome = played(FakeWorker(slow_but(field[place]), 0.002), field, search=how)
        assert winner(outcome) == field[place]
        assert [m.candidate for m in outcome.measured] == field
        assert outcome.gain.ratio == pytest.approx(2.0 if place else 1.0, rel=0.02)
        assert outcome.gain.low <= outcome.gain.ratio <= outcome.gain.high


def test_halving_is_short_for_many_and_long_for_few():
    field, worker = candidates(40), FakeWorker(slow_but(None), 0.002)
    played(worker, field)
    sizes = [(len(job.candidates), job.depth) for job in worker.jobs]
    final, rung = Depths(True).final(), Depths(True).rung
    assert sizes[:6] == [(8, rung(0))] * 5 + [(5, rung(0))]
    assert sizes[6:9] == [(20, rung(1)), (10, rung(2)), (5, rung(3))][: len(sizes[6:9])]
    assert sizes[-1][1] == final and sizes[-1][0] <= 5
    assert all(job.candidates[0] == field[0] for job in worker.jobs), "the reference is first in every job"
    assert rung(1).turn_ms == 2 * rung(0).turn_ms and Depths(False).rung(1).rounds == 2 * Depths(False).rung(0).rounds


def test_exhaustive_gives_everyone_the_final_depth():
    field, worker = candidates(20), FakeWorker(slow_but(None), 0.002)
    played(worker, field, search="exhaustive")
    assert {job.depth for job in worker.jobs} == {Depths(True).final()}
    assert all(any(c in job.candidates for job in worker.jobs) for c in field)


@pytest.mark.parametrize("status", ["wrong", "hung", "crashed"])
@pytest.mark.parametrize("place", [0, 5, 39])
def test_a_bad_candidate_never_wins_however_fast(status, place):
    field = candidates(40)
    worker = FakeWorker(slow_but(field[place], 0.001), 0.002, bad={str(field[place]): (status, "planted")})
    outcome = played(worker, field)
    assert winner(outcome) != field[place]
    assert outcome.measured[place].status == status and outcome.measured[place].reason == "planted"
    assert sum(field[place] in job.candidates for job in worker.jobs) == 1, "it is not tried again"


def test_what_does_not_build_or_spills_is_not_measured():
    field = candidates(10)
    built = {
        str(field[3]): Built(failure="ptxas: no"),
        str(field[4]): Built(255, 64, 0),
        str(field[5]): Built(64, 0, 9),
    }
    worker = FakeWorker(slow_but(field[4]), 0.002)
    outcome = played(worker, field, built)
    assert [m.status for m in outcome.measured[3:5]] == ["does not build", "spills"]
    assert not any(field[i] in job.candidates for job in worker.jobs for i in (3, 4))
    assert outcome.measured[5].built == Built(64, 0, 9)


def test_a_reference_that_fails_is_replaced():
    field = candidates(20)
    outcome = played(FakeWorker(slow_but(field[7]), 0.002, bad={str(field[0]): ("wrong", "")}), field)
    assert winner(outcome) == field[7] and outcome.gain.ratio == pytest.approx(2.01, rel=0.02)

    worker = FakeWorker(slow_but(field[7]), 0.002)
    worker.before = lambda job: worker.bad.update({str(field[0]): ("crashed", "")}) if len(worker.jobs) == 3 else None
    outcome = played(worker, field)
    assert winner(outcome) == field[7] and outcome.measured[0].status == "crashed"


def test_finalists_that_fail_in_the_final_give_way_to_the_rest():
    field = candidates(20)
    worker = FakeWorker(lambda c: 1.0 if c.config["tile"] in (2, 3, 4, 5) else 2.0 + c.config["tile"], 0.002)
    bad = {str(c): ("crashed", "") for c in field[2:6]}
    worker.before = lambda job: worker.bad.update(bad) if job.depth == Depths(True).final() else None
    assert winner(played(worker, field)) == field[0]


def test_nothing_is_ranked_where_nothing_is_good():
    field = candidates(6)
    outcome = played(FakeWorker(slow_but(None), bad={str(c): ("wrong", "") for c in field}), field)
    assert outcome.ranked == () and outcome.gain is None and len(outcome.measured) == 6
    assert played(FakeWorker(slow_but(None)), []).measured == ()


def test_the_best_of_every_other_kernel_is_kept():
    field = candidates(30)
    times = {str(c): 1.0 + (c.config["tile"] * 7 % 30) / 10 for c in field}
    outcome = played(FakeWorker(lambda c: times[str(c)], 0.001), field)
    best = [min((c for c in field if c.kernel == k), key=lambda c: times[str(c)]) for k in ("triton", "cuda", "numba")]
    assert [m.candidate for m in outcome.ranked] == sorted(best, key=lambda c: times[str(c)])


def test_among_equals_the_first_wins_and_what_is_tuned_now_stays():
    field = candidates(30)
    for seed in range(10):
        assert winner(played(FakeWorker(lambda c: 1.0, 0.005, seed), field)) == field[0]
        assert winner(played(FakeWorker(lambda c: 1.0, 0.005, seed), field, present=11)) == field[11]
    clearly_faster = FakeWorker(slow_but(field[20]), 0.005)
    assert winner(played(clearly_faster, field, present=11)) == field[20]


def agreement(noise, runs=60, count=24, again=False):
    """The share of problems for which a second run, with other noise, chooses as the first did."""
    alike = 0
    for problem in range(runs):
        field, drawn = candidates(count), random.Random(problem)
        times = {str(c): 2.0 ** drawn.random() for c in field}
        first = winner(played(FakeWorker(lambda c, t=times: t[str(c)], noise, 2 * problem), field))
        present = field.index(first) if again else None
        second = played(FakeWorker(lambda c, t=times: t[str(c)], noise, 2 * problem + 1), field, present=present)
        alike += winner(second) == first
        assert times[str(first)] <= 1.03 * min(times.values()), "and what is chosen is fast"
    return alike / runs


def test_two_runs_choose_alike():
    assert agreement(0.002) >= 0.95
    assert agreement(0.01, again=True) >= 0.95, "a second tune of what is tuned, on a machine with more noise"


def test_a_drift_that_all_share_decides_nothing():
    """The machine slows down by a half within a job: held round by round against the reference, nothing changes."""

    class Drifting(FakeWorker):
        def measure(self, job, progress=lambda candidate, what: None):
            found = super().measure(job, progress)
            drift = [1 + 0.5 * i / job.depth.rounds for i in range(job.depth.rounds)]
            slowed = (tuple(s * d for s, d in zip(m.samples, drift)) for m in found)
            against = tuple(s * d for s, d in zip(found[0].against, drift))
            return [dataclasses.replace(m, samples=samples, against=against) for m, samples in zip(found, slowed)]

    field = candidates(12)
    outcome = played(Drifting(lambda candidate: 1.0 if candidate == field[11] else 1.025), field)
    assert winner(outcome) == field[11]  # 2.5 % are more than nothing, though less than the drift
    assert (outcome.gain.low, outcome.gain.ratio, outcome.gain.high) == pytest.approx((1.025, 1.025, 1.025))


def test_stable_bits_are_those_of_the_default():
    field = candidates(12)
    digests = {str(c): "other" for c in field[3:]} | {str(field[5]): "same", str(field[6]): "restless"}
    times = lambda c: {1: 1.9, 5: 1.5, 6: 1.0, 9: 0.5}.get(c.config["tile"], 2.0)  # noqa: E731
    worker = FakeWorker(times, 0.002, digests=digests)
    assert winner(played(worker, field)) == field[9]
    assert winner(played(FakeWorker(times, 0.002, digests=digests), field, bits="stable")) == field[5]
    restless = digests | {str(field[0]): "restless"}
    assert winner(played(FakeWorker(times, 0.002, digests=restless), field, bits="stable")) == field[5]


def test_when_time_is_up_the_best_so_far_play_the_final():
    field, worker = candidates(40), FakeWorker(slow_but(None), 0.002)
    outcome = played(worker, field, late=lambda: len(worker.jobs) >= 2)
    assert len(worker.jobs) == 3 and worker.jobs[-1].depth == Depths(True).final()
    assert outcome.cut_short and outcome.ranked and len(outcome.measured) == 15


def test_compilers_are_waited_for_group_by_group():
    """So that measuring begins before the last candidate is built."""
    field, worker, asked = candidates(40), FakeWorker(slow_but(None), 0.002), []
    playing = search.run(PROBLEM, field, Rules(lambda i: asked.append(i) or Built()))
    job = next(playing)
    assert set(asked) == set(range(8))
    playing.send(worker.measure(job))
    assert set(asked) == set(range(15))


@pytest.mark.parametrize("wrong", [{"search": "magic"}, {"bits": "some"}])
def test_an_unknown_rule_is_named(wrong):
    with pytest.raises(BadInput, match=r"must be one of .*, got '(magic|some)'"):
        played(FakeWorker(slow_but(None)), candidates(3), **wrong)
