"""The timer on a CPU with arms of known length; the same functions serve the GPU."""

import statistics
import time

import pytest
import torch

from tilery import timing
from tilery.timing import Timing

CPU = torch.device("cpu")


def test_arms_take_turns_and_sets_rotate():
    order = []
    arms = {name: lambda i, name=name: order.append((name, i)) for name in "ab"}
    found = timing.time_arms(arms, sets=2, device=CPU, rounds=6)
    turns = "".join(name for name, _ in order[4:])  # the first two calls of each warm up
    assert turns == "abba" * 3 and {i for _, i in order} == {0, 1}
    assert all(len(t.samples) == 6 and t.how == "clock" for t in found.values())


def test_times_are_true():
    found = timing.time_arms({"nap": lambda _: time.sleep(0.01)}, 1, CPU, rounds=5)["nap"]
    assert 10 <= min(found.samples) < 20


def test_a_budget_ends_the_rounds_but_not_before_six():
    found = timing.time_arms({"nap": lambda _: time.sleep(0.01)}, 1, CPU, rounds=1000, budget_s=0.0)["nap"]
    assert len(found.samples) == 6


def test_the_ratio_is_taken_round_by_round():
    base, twice = Timing((2.0, 4.0, 8.0, 2.0, 4.0), "clock"), Timing((1.0, 2.0, 4.0, 1.0, 2.0), "clock")
    assert timing.ratio(twice, base) == (2.0, 2.0, 2.0)  # drift that both arms share does not widen it


def test_the_interval_covers_the_median_as_often_as_it_says():
    g = torch.Generator().manual_seed(0)
    covered = 0
    for _ in range(1000):
        low, high = timing.median_interval(torch.randn(20, generator=g).tolist())
        covered += low <= 0 <= high
    assert 940 <= covered <= 995  # exact coverage of this order statistic is 95.9 %


@pytest.mark.parametrize("n", [1, 2, 5, 6, 7, 20, 101])
def test_the_interval_holds_the_median(n):
    samples = [float(i * i % 17) for i in range(n)]
    low, high = timing.median_interval(samples)
    assert low <= statistics.median(samples) <= high


def test_caches_are_cold():
    """A call after the flush reads from memory: slower than the same call warm."""
    x = torch.randn(2**18)  # 1 MiB
    cold = min(timing.time_arms({"": lambda _: x.sum()}, 1, CPU, rounds=30)[""].samples)
    warm = float("inf")
    for _ in range(200):
        start = time.perf_counter()
        x.sum()
        warm = min(warm, (time.perf_counter() - start) * 1e3)
    assert cold > warm


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_host_time_does_not_count():
    x = torch.randn(2**24, device="cuda")

    def slow_host(i):
        time.sleep(0.001)
        x.mul(2)

    found = timing.time_arms({"graph": slow_host}, 1, x.device, rounds=5)["graph"]
    assert found.how == "graph" and found.median < 0.5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_an_arm_that_cannot_be_captured_is_timed_by_events():
    x = torch.randn(2**20, device="cuda")
    found = timing.time_arms({"sync": lambda i: x.sum().item()}, 1, x.device, rounds=5)["sync"]
    assert found.how == "events" and found.median > 0
