"""How candidates are timed on a GPU, with fakes: in pairs where power is the limit, on inputs that rotate."""

import pytest
import torch

import plant
from tilery.base.spec import case
from tilery.core.op import REGISTRY
from tilery.measure import ceilings, timing
from tilery.measure.timing import Depth, Timing
from tilery.tuning import measure
from tilery.tuning.data import GOOD, Candidate, Job, Measured, Problem
from tilery.workbench import bench

OP = REGISTRY["softmax"]
JOB = Job(Problem("softmax", "cuda:0", case(m=4, n=8, dtype="fp32")), (), Depth(6, 1.0, 0.0))


@pytest.fixture
def timed(monkeypatch):
    """What a job's candidates are timed like; their samples are given in ms. The tensors are a CPU's."""
    asked = []
    monkeypatch.setattr(bench, "said", lambda cold, sets, cost, where: "cold")

    def time(flops=1e18, ms=1.0, candidates=2, sets=3):
        rates = ceilings.Ceilings(1e12, 1e12, 1e12, {"fp32": flops}, 1.0)
        monkeypatch.setattr(ceilings, "ceilings", lambda where: rates)

        def time_arms(arms, count, where, depth, base, paired, progress):
            for arm in arms.values():
                for i in range(count):
                    arm(i)
            asked.append({"base": base, "paired": paired, "sets": count, "arms": list(arms)})
            return {name: Timing((ms,) * 6, (ms,) * 6) for name in arms}

        monkeypatch.setattr(timing, "time_arms", time_arms)
        drawn = [(torch.randn(4, 8),) for _ in range(sets)]
        found = {i: Measured(Candidate("numba", {"parallel": bool(i % 2)})) for i in range(candidates)}
        return measure._timed(OP, JOB, found, drawn, lambda number, what: None), asked[-1]

    return time


@pytest.mark.parametrize(("flops", "paired"), [(1.0, True), (1e18, False)], ids=["arithmetic", "memory"])
def test_where_power_is_the_limit_candidates_are_timed_in_pairs(timed, flops, paired):
    _, asked = timed(flops, ms=1e9)
    assert asked == {"base": "0", "paired": paired, "sets": 3, "arms": ["0", "1"]}


def test_one_candidate_alone_has_nobody_beside_it(timed):
    assert timed(1.0, ms=1e9, candidates=1)[1]["paired"] is False


def test_a_candidate_is_timed_on_every_set(timed, monkeypatch):
    seen = []
    plant.after(monkeypatch, OP, "numba", lambda x: seen.append(x.data_ptr()), "x")
    timed(candidates=1)
    assert len(set(seen)) == 3


def test_a_time_that_cannot_be_true_wins_nothing(timed):
    found, _ = timed(1.0, ms=1e-6)
    assert all(m.status == "wrong" and "a measurement error, not a speed" in m.reason for m in found.values())
    assert all(m.status == GOOD for m in timed(1e18, ms=1.0)[0].values())
