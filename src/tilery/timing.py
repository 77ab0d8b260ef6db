"""The one timer: for bench, tuner and report. Arms are timed in turns in one run, cold, on data that rotates.

An arm is called with the number of the input set to use, and only launches. On a GPU its calls are captured in a CUDA
graph, so that host time does not count; where a capture is refused, events are recorded around calls queued behind
a sleeping kernel. On a CPU the clock is perf_counter, and the caches are overwritten before every call.
"""

import ctypes
import functools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

Arm = Callable[[int], object]
Progress = Callable[[str], None]

LEAST_ROUNDS = 6  # five samples cannot give a 95 % interval of the median
_CPU_FLUSH_BYTES = 128 * 2**20  # several times the last-level cache of common CPUs
_SLEEP_CYCLES = 2_000_000  # about 1 ms: time to queue calls behind it
_GRAPH_MS = 2.0  # a graph holds enough calls to last this long


@dataclass(frozen=True)
class Timing:
    samples: tuple[float, ...]  # ms a call
    how: str  # graph, events or clock

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def interval(self) -> tuple[float, float]:
        return median_interval(self.samples)


def median_interval(samples: Iterable[float]) -> tuple[float, float]:
    """95 % interval of the median from order statistics: exact for any distribution, no resampling."""
    ordered = sorted(samples)
    n = len(ordered)
    tail, rank = 0.0, 0
    while rank < n // 2 and tail + math.comb(n, rank) / 2**n <= 0.025:
        tail += math.comb(n, rank) / 2**n
        rank += 1
    rank = max(rank - 1, 0)
    return ordered[rank], ordered[n - 1 - rank]


def ratio(timing: Timing, base: Timing) -> tuple[float, float, float]:
    """How many times faster than `base`: the median of the ratios round by round, with its interval."""
    rounds = [b / t for t, b in zip(timing.samples, base.samples, strict=True)]
    return statistics.median(rounds), *median_interval(rounds)


def time_arms(
    arms: Mapping[str, Arm],
    sets: int,
    device: torch.device,
    rounds: int = 20,
    budget_s: float = 10.0,
    progress: Progress = lambda _: None,
) -> dict[str, Timing]:
    """Every arm once a round, forwards then backwards, for `rounds` rounds or until the budget is spent (but six)."""
    make = _gpu_sampler if device.type == "cuda" else _cpu_sampler
    samplers = {}
    for name, arm in arms.items():
        progress(f"warming up {name}")
        samplers[name] = make(arm, sets, device)
    samples: dict[str, list[float]] = {name: [] for name in arms}
    start = time.perf_counter()
    for i in range(rounds):
        progress(f"round {i + 1} of {rounds}")
        for name in arms if i % 2 == 0 else reversed(list(arms)):
            samples[name].append(samplers[name].sample())
        if i + 1 >= LEAST_ROUNDS and time.perf_counter() - start > budget_s:
            break
    return {name: Timing(tuple(s), samplers[name].how) for name, s in samples.items()}


def best_ms(call: Callable[[], object], device: torch.device, rounds: int = 7) -> float:
    """The least time of one call: for ceilings, where the question is what the machine can do."""
    return min(time_arms({"": lambda _: call()}, 1, device, rounds)[""].samples)


class _CpuSampler:
    how = "clock"

    def __init__(self, arm: Arm, sets: int) -> None:
        self.arm, self.sets, self.calls = arm, sets, 0
        self.flush = torch.empty(_CPU_FLUSH_BYTES // 4)

    def sample(self) -> float:
        self.flush.fill_(self.calls)
        self.calls += 1
        start = time.perf_counter()
        self.arm(self.calls % self.sets)
        return (time.perf_counter() - start) * 1e3


def _cpu_sampler(arm: Arm, sets: int, device: torch.device) -> _CpuSampler:
    _keep_freed_memory()
    sampler = _CpuSampler(arm, sets)
    for _ in range(2):  # compiles, wakes threads
        sampler.sample()
    return sampler


@functools.cache
def _keep_freed_memory() -> None:
    """glibc returns large blocks to the system, and each call would fault its output in anew: 8 of 10 ms for 32 MiB."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        for parameter in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            libc.mallopt(parameter, 2**30)


class _GraphSampler:
    how = "graph"

    def __init__(self, graph: torch.cuda.CUDAGraph, calls: int) -> None:
        self.graph, self.calls = graph, calls

    def sample(self) -> float:
        return _elapsed(self.graph.replay) / self.calls


class _EventSampler:
    how = "events"

    def __init__(self, arm: Arm, sets: int, calls: int) -> None:
        self.arm, self.sets, self.calls = arm, sets, calls

    def sample(self) -> float:
        torch.cuda._sleep(_SLEEP_CYCLES)
        return _elapsed(lambda: [self.arm(i % self.sets) for i in range(self.calls)]) / self.calls


def _gpu_sampler(arm: Arm, sets: int, device: torch.device) -> _GraphSampler | _EventSampler:
    with torch.cuda.device(device):
        _elapsed(lambda: arm(0))  # compiles
        each = _elapsed(lambda: [arm(i % sets) for i in range(5)]) / 5
        calls = max(sets, min(1000, math.ceil(_GRAPH_MS / max(each, 1e-3))))
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                for i in range(calls):
                    arm(i % sets)
        except RuntimeError:  # this arm synchronises or uses a stream of its own; its row says "events"
            _end_failed_capture(device)
            return _EventSampler(arm, sets, min(calls, 20))
        sampler = _GraphSampler(graph, calls)
        _elapsed(graph.replay)
        return sampler


def _end_failed_capture(device: torch.device) -> None:
    """A failed capture leaves torch's generator waiting for its end, and random numbers fail: a good one ends it."""
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device=device)


def _elapsed(work: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))
