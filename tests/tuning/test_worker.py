"""Candidates that are wrong, raise, hang or take their process with them: none is chosen, none costs the others."""

import pytest
import torch

import plant
from processes import CLOCK, HANG_S, package
from tilery.base.errors import BadInput
from tilery.base.spec import case
from tilery.core.op import REGISTRY
from tilery.measure import ceilings
from tilery.measure.timing import Depth
from tilery.tuning import measure
from tilery.tuning.candidates import collect
from tilery.tuning.data import GOOD, Candidate, Job, Problem
from tilery.tuning.worker import Worker

QUICK = Depth(rounds=6, turn_ms=1.0, warm_s=0.0)
SOFTMAX = Problem("softmax", "cpu", case(m=64, n=256, dtype="fp32"))
PLANTED = """
import os, pathlib, signal, threading
from dataclasses import dataclass
import torch
from planted.clock import passes
from tilery.base.errors import CompileFailed
from tilery.base.launch import Host
from tilery.core.kernel import Kernel

calls = []

@dataclass(frozen=True)
class Config:
    kind: str

class Planted(Kernel):
    archs, Config = ("cpu",), Config

    def refusal(self, call, config=None): return "not on Sundays" if config and config.kind == "refuses" else None
    def default(self, call): return Config("right")
    def launches(self, call, config): return [Host(run, (call.x, call.y, config.kind))]

def note(kind):
    log = pathlib.Path(os.environ["PLANTED_LOG"])
    with log.open("a") as file:
        file.write(kind + "\\n")
    return log.read_text().split().count(kind)

def run(x, out, kind):
    calls.append(kind)
    passes(10 if kind == "slow" else 1)
    if kind == "dies" or (kind == "dies_late" and calls.count(kind) > 5) or (kind == "dies_once" and note(kind) == 1):
        note("died_" + kind)
        os.kill(os.getpid(), signal.SIGSEGV)
    if kind == "ends":
        print("the last words", flush=True)
        os._exit(3)
    if kind == "hangs":
        note(kind)
        threading.Event().wait()
    if kind == "raises":
        raise ZeroDivisionError("nothing to divide by")
    if kind == "does_not_build":
        raise CompileFailed("line 3: no such type")
    if kind == "wrong":
        return
    if kind == "wrong_late" and calls.count(kind) > 5:
        return
    torch.softmax(x, -1, out=out)
    if kind == "random":
        out[0, 0] *= 1 + 2**-22 * (len(calls) % 2)  # by the last bits, from call to call
    if kind == "other_bits":
        out.mul_(1 + 2**-22)

kernel = Planted()
"""


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """How often planted kernels noted something. A plug-in has them that only the child sees."""
    folder = tmp_path_factory.mktemp("planted")
    path = package(folder, "[tilery.kernels]\nsoftmax/numba.planted = planted.kernels:kernel\n",
                   planted={"clock": CLOCK, "kernels": PLANTED})  # fmt: skip
    (folder / "log").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        patch.setenv("PLANTED_LOG", str(folder / "log"))
        yield lambda what: (folder / "log").read_text().split().count(what)


@pytest.fixture(scope="module")
def worker(log):
    with Worker("cpu", silence_s=HANG_S) as kept:
        yield kept


def job(*kinds, problem=SOFTMAX):
    return Job(problem, tuple(Candidate("numba.planted", {"kind": kind}) for kind in kinds), QUICK)


def by_kind(found):
    return {m.candidate.config["kind"]: m for m in found}


@pytest.fixture(scope="module")
def found(worker):
    kinds = ("right", "wrong", "raises", "slow", "random", "other_bits", "refuses", "does_not_build", "wrong_late")
    results = worker.measure(job(*kinds))
    assert [m.candidate.config["kind"] for m in results] == list(kinds)
    return by_kind(results)


@pytest.mark.parametrize("kind", ["right", "slow", "random", "other_bits"])
def test_good_ones_are_timed_in_the_same_rounds(found, kind):
    assert found[kind].status == GOOD and len(found[kind].samples) == 6 and found[kind].error < 1e-6
    assert found[kind].against == found["right"].samples


def test_the_slow_one_is_slower(found):
    assert found["slow"].ms == pytest.approx(10) and found["slow"].slower == pytest.approx(10)
    assert found["right"].ms == pytest.approx(1) and found["right"].slower == 1.0


@pytest.mark.parametrize(
    ("kind", "status", "reason"),
    [
        ("wrong", "wrong", "output 0 has error"),
        ("wrong_late", "wrong", "right before it was timed, not after"),
        ("raises", "crashed", "ZeroDivisionError: nothing to divide by"),
        ("refuses", "refused", "not on Sundays"),
        ("does_not_build", "does not build", "line 3: no such type"),
    ],
)
def test_bad_ones_say_why_and_have_no_time(found, kind, status, reason):
    assert found[kind].status == status and reason in found[kind].reason and not found[kind].samples


def test_bits_that_change_from_run_to_run_are_noticed(found):
    assert not found["random"].repeats
    assert found["right"].repeats and found["slow"].repeats and found["other_bits"].repeats


def test_the_digest_is_the_same_for_the_same_bits(found):
    assert found["right"].digest == found["slow"].digest != found["other_bits"].digest
    assert len(found["right"].digest) == 64


def test_one_that_kills_its_process_is_tried_twice_and_the_others_are_measured(worker, log):
    said = []
    results = worker.measure(
        job("right", "dies", "wrong", "slow"), lambda c, what: said.append((c and c.config["kind"], what))
    )
    found = by_kind(results)
    assert found["dies"].status == "crashed" and "its process was killed by signal 11" in found["dies"].reason
    assert log("died_dies") == 2
    assert found["right"].status == found["slow"].status == GOOD and found["wrong"].status == "wrong"
    assert found["slow"].slower == pytest.approx(10)
    assert said.count(("dies", "checking")) == 2 and ("slow", "round 6 of 6") in said


def test_one_that_dies_once_is_measured(worker, log):
    found = by_kind(worker.measure(job("right", "dies_once")))
    assert log("died_dies_once") == 1
    assert found["dies_once"].status == GOOD and len(found["dies_once"].samples) == 6


def test_one_that_dies_while_it_is_timed_is_the_one_to_blame(worker, log):
    found = by_kind(worker.measure(job("dies_late", "right", "slow")))
    assert found["dies_late"].status == "crashed" and log("died_dies_late") == 2
    assert found["right"].against == found["right"].samples  # the first good one stands in for the first
    assert found["slow"].against == found["right"].samples


@pytest.mark.slow
def test_one_that_hangs_is_ended_after_the_limit(log):
    with Worker("cpu", silence_s=20.0) as worker:  # long enough for the others, also on a busy machine
        found = by_kind(worker.measure(job("right", "hangs")))
    assert found["hangs"].status == "hung" and "no answer within 20 s" in found["hangs"].reason
    assert log("hangs") == 2 and found["right"].status == GOOD


def test_if_all_are_bad_all_say_so(worker):
    found = by_kind(worker.measure(job("wrong", "raises", "ends")))
    assert {kind: m.status for kind, m in found.items()} == {"wrong": "wrong", "raises": "crashed", "ends": "crashed"}
    assert "its process ended with code 3\nthe last words" in found["ends"].reason


def test_what_is_wrong_with_the_problem_is_raised_and_the_worker_goes_on(worker):
    with pytest.raises(BadInput, match="dtype must be one of"):
        worker.measure(job("right", problem=Problem("softmax", "cpu", case(m=8, n=64, dtype="int4"))))
    assert worker.measure(job("right"))[0].status == GOOD


def test_what_fails_before_any_candidate_is_said_of_all(worker, tmp_path):
    gone = Problem("softmax", "cpu", saved=str(tmp_path / "gone.pt"))
    found = worker.measure(job("right", "slow", problem=gone))
    assert [m.status for m in found] == ["crashed"] * 2
    assert all("failed before or between its candidates" in m.reason and "gone.pt" in m.reason for m in found)


def test_a_job_that_is_broken_off_leaves_nothing_to_the_next(worker):
    def interrupts(candidate, what):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        worker.measure(job("right", "slow"), interrupts)
    assert [m.candidate.config["kind"] for m in worker.measure(job("other_bits"))] == ["other_bits"]


# In this process


def test_the_digest_depends_on_where_a_value_stands():
    bits = torch.randn(64).view(torch.uint8)
    turned = bits.view(torch.int64).flip(0).view(torch.uint8)
    assert measure._digest([bits]) == measure._digest([bits.clone()]) != measure._digest([turned])
    assert measure._digest([bits[:32], bits[32:]]) != measure._digest([bits])


def here(problem, *candidates):
    found = dict(measure.measured(Job(problem, candidates, QUICK), lambda number, what: None))
    return [found[i] for i in range(len(candidates))]


def own(op, kernel="numba", **params):
    problem = Problem(op, "cpu", case(**params))
    return problem, collect(problem, (kernel,))[0]


def test_saved_arguments_are_measured_as_they_lie(tmp_path, monkeypatch):
    x = torch.randn(40, 100)[:, 1:65]
    torch.save((x,), tmp_path / "call.pt")
    (_, candidates), seen = own("softmax", m=40, n=64, dtype="fp32"), set()

    def look(x):
        seen.add((tuple(x.stride()), x.data_ptr() % 16))

    plant.after(monkeypatch, REGISTRY["softmax"], "numba", look, "x")
    found = here(Problem("softmax", "cpu", saved=str(tmp_path / "call.pt")), *candidates[:2])
    assert seen == {((100, 1), 4)} and all(m.status == GOOD and len(m.samples) == 6 for m in found)


def test_an_op_in_place_starts_from_the_same_data_every_time():
    params = next(c for c in REGISTRY["rope_"].cases["test"] if c.params.get("dtype") == "fp32").params
    problem, candidates = own("rope_", **params)
    first, again = here(problem, *candidates[:1])[0], here(problem, *candidates[:1])[0]
    assert first.status == GOOD and first.repeats and first.digest == again.digest


def test_nothing_to_write_is_no_failure():
    problem, candidates = own("softmax", m=0, n=64, dtype="fp32")
    assert here(problem, *candidates[:1])[0].status == GOOD


def test_a_speed_that_cannot_be_is_named(monkeypatch):
    rates = ceilings.Ceilings(1e9, 1e9, 1e9, {"fp32": 1e9}, 1.0)
    monkeypatch.setattr(ceilings, "ceilings", lambda where: rates)
    op, cpu = REGISTRY["matmul"], torch.device("cpu")
    args = op.complete((), op.inputs(m=100, n=100, k=100, dtype="fp32", device="cpu", seed=0))
    speeds = measure._Speeds(op, op.specs(args), [args], cpu)  # 2 ms of arithmetic
    assert speeds.arithmetic and speeds.impossible(1.9) is None
    assert "a measurement error, not a speed: 0.5 ms, where this machine needs 2 ms" in speeds.impossible(0.5)


def test_a_worker_that_was_started_early_measures_and_may_be_closed_unused():
    candidates, _ = collect(SOFTMAX, ("numba",))
    with Worker("cpu", HANG_S) as worker:
        worker.start()
        worker.start()
        found = worker.measure(Job(SOFTMAX, tuple(candidates[:1]), QUICK))
        assert [one.status for one in found] == [GOOD]
    idle = Worker("cpu", HANG_S)
    idle.start()
    idle.close()
    assert worker.measure(Job(SOFTMAX, tuple(candidates[:1]), QUICK))[0].status == GOOD, "a closed one starts anew"
    worker.close()
