"""The timer on a CPU with arms of known length; the same functions serve the GPU."""

import contextlib
import statistics
from types import SimpleNamespace

import pytest
import torch

from tilery.measure import timing
from tilery.measure.timing import Depth, Timing

CPU = torch.device("cpu")


QUICK = Depth(rounds=6, turn_ms=0.0, warm_s=0.0)  # a turn is two calls


@pytest.fixture
def sleep(monkeypatch):
    """Passes time on a clock of the test's own: no test waits, and a busy machine does not matter."""
    now = [0.0]
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def pass_time(seconds):
        now[0] += seconds

    return pass_time


def test_arms_take_turns_there_and_back():
    order = []
    arms = {name: lambda i, name=name: order.append(name) for name in "abc"}
    found = timing.time_arms(arms, 1, CPU, QUICK)
    assert order[::2] == order[1::2]
    turns = order[::2]
    assert "".join(turns[:3]) == "abc"  # the first calls of each warm up
    rounds = ["".join(turns[i : i + 6]) for i in range(3, len(turns), 6)]
    assert len(rounds) == 6 and all(turns == turns[::-1] and set(turns) == set("abc") for turns in rounds)
    assert len(set(rounds)) > 1  # no arm always follows the same one
    assert all(len(t.samples) == 6 and t.how == "clock" for t in found.values())


def test_drift_falls_on_all_arms_alike(sleep):
    """An arm's two turns of a round lie evenly about its middle: what grows steadily costs each the same."""
    calls = []

    def slower_and_slower(_):
        calls.append(1)
        sleep(0.001 * len(calls))

    found = timing.time_arms({"a": slower_and_slower, "b": slower_and_slower}, 1, CPU, QUICK)
    assert found["a"].samples == pytest.approx(found["b"].samples)


def test_times_are_those_of_a_call(sleep):
    found = timing.time_arms({"nap": lambda _: sleep(0.01)}, 1, CPU, QUICK)["nap"]
    assert found.samples == pytest.approx([10.0] * 6) and found.median == pytest.approx(10.0)


@pytest.mark.parametrize(("turn_ms", "calls"), [(0.0, 2), (20.0, 2), (21.0, 3), (100.0, 10)])
def test_a_turn_lasts_as_long_as_it_is_told(sleep, turn_ms, calls):
    made = []

    def arm(_):
        made.append(1)
        sleep(0.01 if len(made) % 2 else 0.0101)  # above 10 ms, so that a rounding does not matter

    found = timing.time_arms({"nap": arm}, 1, CPU, Depth(6, turn_ms, 0.0), cold=False)["nap"]
    assert len(made) == calls * 13 and found.median == pytest.approx(10.05, abs=0.05)


@pytest.mark.parametrize(("budget_s", "rounds"), [(0.0, 6), (0.39, 10)])
def test_a_budget_ends_the_rounds_but_not_before_six(sleep, budget_s, rounds):
    """A round calls each arm four times: 40 ms of them fit ten times into 390, the last one begun in time."""
    depth = Depth(rounds=1000, turn_ms=0.0, warm_s=0.0, budget_s=budget_s)
    found = timing.time_arms({"nap": lambda _: sleep(0.01)}, 1, CPU, depth)["nap"]
    assert len(found.samples) == rounds


def test_warming_up_lasts_its_time_and_until_two_passes_agree(sleep):
    def seconds(nap):
        made = []

        def arm(_):
            made.append(nap(len(made)))
            sleep(made[-1])

        timing.time_arms({"": arm}, 1, CPU, Depth(rounds=0, turn_ms=0.0, warm_s=0.2), cold=False)
        return sum(made[2:])  # the first two calls compile

    assert 0.2 < seconds(lambda n: 0.02) < 0.29
    assert 0.59 < seconds(lambda n: 0.01 if n // 2 % 2 else 0.03) < 0.67  # never settles: three times as long


def test_the_ratio_is_taken_round_by_round():
    twice = Timing((1.0, 2.0, 4.0, 1.0, 2.0), against=(2.0, 4.0, 8.0, 2.0, 4.0))
    assert twice.ratio == (2.0, 2.0, 2.0)  # drift that both arms share does not widen it
    assert Timing((1.0, 2.0)).ratio is None


def test_in_pairs_every_arm_stands_between_turns_of_the_base():
    order = []
    arms = {name: lambda i, name=name: order.append(name) for name in "abc"}
    timing.time_arms(arms, 1, CPU, QUICK, base="a", paired=True)
    turns = order[::2]
    rounds = ["".join(turns[i : i + 8]) for i in range(3, len(turns), 8)]
    assert len(rounds) == 6 and set(rounds) <= {"abbaacca", "accaabba"}


def test_an_arm_is_held_against_the_turns_of_the_base_beside_it(sleep):
    """The card has more power left after `cool`: the turn of the base that profits counts for `cool` alone."""
    before = ["base"]

    def arm(name):
        def call(_):
            sleep(0.005 if before[0] == "cool" and name != "cool" else 0.02)
            before[0] = name

        return call

    arms = {name: arm(name) for name in ("base", "same", "cool")}
    found = timing.time_arms(arms, 1, CPU, QUICK, base="base", paired=True, cold=False)
    ratios = [b / s for s, b in zip(found["same"].samples, found["same"].against)]
    assert ratios[1:] == pytest.approx([1.0] * 5)  # the first turn of all follows the last of the warm-up
    assert found["base"].ratio == (1.0, 1.0, 1.0)


def test_the_interval_covers_the_median_as_often_as_it_says():
    g = torch.Generator().manual_seed(0)
    covered = 0
    for _ in range(1000):
        low, high = timing.median_interval(torch.randn(20, generator=g).tolist())
        covered += low <= 0 <= high
    assert 910 <= covered <= 995


@pytest.mark.parametrize("n", [1, 2, 5, 6, 7, 20, 101])
def test_the_interval_holds_the_median(n):
    samples = [float(i * i % 17) for i in range(n)]
    low, high = timing.median_interval(samples)
    assert low <= statistics.median(samples) <= high


def test_caches_are_overwritten_before_every_cold_call():
    """Each time with other values: a store of what is there already might be left out."""
    found = []
    sampler = timing._CpuSampler(lambda _: found.append(sampler.flush[[0, -1]].tolist()), cold=True, turn_ms=0.0)
    for _ in range(3):
        sampler.block(lambda: None)
    assert sampler.flush.nbytes >= 64 * 2**20 and all(first == last for first, last in found)
    assert len({first for first, _ in found}) == len(found) == 6
    assert timing._cpu_sampler(lambda _: None, False, QUICK).flush.nbytes == 0


def test_by_events_all_sets_come_round(monkeypatch):
    called = []
    monkeypatch.setattr(timing, "_elapsed", lambda work, meanwhile=None: [work(), 6.0][1])
    monkeypatch.setattr(torch.cuda, "_sleep", lambda _: None, raising=False)
    sampler = timing._EventSampler(called.append, sets=5, calls=3, turns=2)
    assert sampler.block(lambda: None) == pytest.approx(2.0)  # two turns of 6 ms, three calls in each
    sampler.block(lambda: None)
    assert called == [i % 5 for i in range(12)]


def test_a_graphs_time_is_that_of_one_call(monkeypatch):
    """A graph of 10 calls that takes 4 ms is replayed until a turn lasts 20 ms."""
    replayed = []
    graph = SimpleNamespace(replay=lambda: replayed.append(1))

    def elapsed(work, meanwhile=None):
        before = len(replayed)
        work()
        return 4.0 * (len(replayed) - before)

    monkeypatch.setattr(timing, "_elapsed", elapsed)
    sampler = timing._GraphSampler(graph, calls=10, turn_ms=20.0)
    before = len(replayed)
    assert sampler.block(lambda: None) == pytest.approx(0.4) and len(replayed) - before == 5


def test_every_set_was_called_before_a_graph_is_captured(monkeypatch):
    """With fakes: an arm that looks at each set once, from the host, must not do so while it is captured."""
    called, captured = [], []

    @contextlib.contextmanager
    def capture(graph):
        before = len(called)
        yield
        captured.extend(called[before:])

    monkeypatch.setattr(timing, "_elapsed", lambda work, meanwhile=None: [work(), 1.0][1])
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "_sleep", lambda _: None, raising=False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    monkeypatch.setattr(torch.cuda, "graph", capture)
    sampler = timing._gpu_sampler(called.append, 64, torch.device("cuda", 0), QUICK)
    assert sampler.how == "graph" and captured == list(range(64))
    assert set(called[: -len(captured)]) == set(range(64))


@pytest.mark.gpu
def test_on_a_gpu_the_host_does_nothing_while_an_arm_is_timed():
    x, calls = torch.randn(2**20, device="cuda"), []

    def arm(i):
        calls.append(i)
        x.mul(2)

    sampler = timing._gpu_sampler(arm, 1, x.device, QUICK)
    before = len(calls)
    assert sampler.how == "graph" and sampler.block(lambda: None) > 0 and len(calls) == before


@pytest.mark.gpu
def test_on_a_gpu_an_arm_that_cannot_be_captured_is_timed_by_events():
    x = torch.randn(2**20, device="cuda")
    found = timing.time_arms({"sync": lambda i: x.sum().item()}, 1, x.device, QUICK)["sync"]
    assert found.how == "events" and found.median > 0
