"""The one timer: for bench, tuner and report. Arms take turns in one run, on data that rotates.

What ran before an arm decides how much power the card has left for it: a cuBLAS product of 4096³ on an H200 took 20 %
less time after a kernel that draws little. So the order changes from round to round, and where power is the limit each
arm stands between two turns of the baseline, which it is held against.

An arm is called with the number of the input set to use, and only launches. On a GPU its calls are captured in a CUDA
graph, so that host time does not count; where a capture is refused, events are recorded around calls queued behind
a sleeping kernel. On a CPU the clock is perf_counter, and for cold times the caches are overwritten before every call.
"""

import ctypes
import functools
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from tilery.hardware import telemetry

Arm = Callable[[int], object]
Progress = Callable[[str, str], None]  # (arm, what is under way)

LEAST_ROUNDS = 6  # fewer samples than this have no interval worth the name
_RESAMPLES = 2000
_CPU_FLUSH_BYTES = 128 * 2**20  # several times the last-level cache of common CPUs
_SLEEP_CYCLES = 2_000_000  # about 1 ms: time to queue calls behind it
_GRAPH_MS = 2.0  # a graph holds enough calls to last this long
_STEADY = 0.01  # two passes that differ by less are a machine at rest


@dataclass(frozen=True)
class Depth:
    """How much is measured: every round is there and back through the arms, so drift falls on all alike."""

    rounds: int
    turn_ms: float  # an arm's turn lasts at least this long
    warm_s: float  # all arms in turns, before the first round that counts
    budget_s: float = 60.0  # after it no new round is begun, but six there are

    def __str__(self) -> str:
        return f"{self.rounds} rounds of {self.turn_ms:g} ms turns"


FULL = Depth(rounds=10, turn_ms=10.0, warm_s=0.5)  # the protocol: what is claimed is measured so
SCREEN = Depth(rounds=LEAST_ROUNDS, turn_ms=2.0, warm_s=0.05)
_CPU_CALLS = 2  # of a turn on a CPU, at least: one call may meet an interrupt
_BURST = Depth(rounds=7, turn_ms=2.0, warm_s=0.0)


@dataclass(frozen=True)
class Timing:
    samples: tuple[float, ...]  # ms a call, one a round
    against: tuple[float, ...] = ()  # the baseline's, in the same rounds; empty where there is none
    how: str = "clock"  # graph, events or clock
    conditions: telemetry.Reading | None = None  # medians while it ran; None where nothing can be read

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def interval(self) -> tuple[float, float]:
        return median_interval(self.samples)

    @property
    def ratio(self) -> tuple[float, float, float] | None:
        """How many times faster than the baseline: the median of the ratios round by round, with its interval."""
        if not self.against:
            return None
        rounds = [b / t for t, b in zip(self.samples, self.against, strict=True)]
        return statistics.median(rounds), *median_interval(rounds)


def median_interval(samples: Iterable[float]) -> tuple[float, float]:
    """95 % bootstrap interval of the median; the same for the same samples."""
    values = np.asarray(list(samples))
    drawn = np.random.default_rng(0).integers(len(values), size=(_RESAMPLES, len(values)))
    low, high = np.quantile(np.median(values[drawn], axis=1), (0.025, 0.975))
    return float(low), float(high)


def time_arms(
    arms: Mapping[str, Arm],
    sets: int,
    device: torch.device,
    depth: Depth = FULL,
    base: str | None = None,
    paired: bool = False,
    cold: bool = True,
    progress: Progress = lambda arm, what: None,
) -> dict[str, Timing]:
    """Rounds of turns there and back. `paired`: every arm has turns of `base` on both sides, to be held against."""
    samplers: dict[str, _Sampler] = {}
    for name, arm in arms.items():
        progress(name, "first calls")
        on_gpu = device.type == "cuda"
        samplers[name] = _gpu_sampler(arm, sets, device, depth) if on_gpu else _cpu_sampler(arm, cold, depth)
    _warm_up(samplers, depth, progress)
    watch, order = telemetry.watch(device), list(samplers)
    rounds: list[_Round] = []
    readings: dict[str, list[telemetry.Reading | None]] = {name: [] for name in samplers}
    start = time.perf_counter()
    for i in range(depth.rounds):
        random.shuffle(order)
        rounds.append(_Round(base))
        for group in _groups(order, base if paired else None):
            turns: list[tuple[str, float]] = []
            for name in group:
                progress(name, f"round {i + 1} of {depth.rounds}")
                ms = samplers[name].block(lambda n=name: readings[n].append(watch()))  # type: ignore[misc]
                turns.append((name, ms))
            rounds[-1].add(turns)
        if i + 1 >= LEAST_ROUNDS and time.perf_counter() - start > depth.budget_s:
            break
    return {
        name: Timing(
            tuple(r.sample(name) for r in rounds),
            tuple(r.against(name) for r in rounds) if base is not None else (),
            sampler.how,
            telemetry.median(readings[name]),
        )
        for name, sampler in samplers.items()
    }


def _groups(order: list[str], base: str | None) -> list[list[str]]:
    """ABBA: through all arms and back; or, arm by arm, between two turns of the base.

    There the first turn of a group follows the base's own last one, so it owes nothing to the arm before.
    """
    if base is None:
        return [order + order[::-1]]
    return [[base, name, name, base] for name in order if name != base]


class _Round:
    """The turns of one round: every arm's mean, and that of the base beside it."""

    def __init__(self, base: str | None) -> None:
        self._base = base
        self._turns: dict[str, list[float]] = {}
        self._beside: dict[str, list[float]] = {}

    def add(self, group: list[tuple[str, float]]) -> None:
        bases = [ms for name, ms in group if name == self._base]
        for name, ms in group:
            self._turns.setdefault(name, []).append(ms)
            self._beside[name] = bases

    def sample(self, name: str) -> float:
        return statistics.mean(self._turns[name])

    def against(self, name: str) -> float:
        assert self._base is not None
        return self.sample(name) if name == self._base else statistics.mean(self._beside[name])


def best_ms(call: Callable[[], object], device: torch.device) -> float:
    """The least time of one call, before heat or power limit it: for ceilings, where the question is what can be."""
    return min(time_arms({"": lambda _: call()}, 1, device, _BURST)[""].samples)


class _Sampler(Protocol):
    how: str

    def block(self, meanwhile: Callable[[], object]) -> float:
        """One turn: ms a call. `meanwhile` is done while the device works."""


def _warm_up(samplers: Mapping[str, _Sampler], depth: Depth, progress: Progress) -> None:
    """In turns until the time is over and two passes agree; a machine that never settles gets three times as long."""
    start, before = time.perf_counter(), math.inf
    while (spent := time.perf_counter() - start) < 3 * depth.warm_s:
        now = 0.0
        for name, sampler in samplers.items():
            progress(name, "warming up")
            now += sampler.block(lambda: None)
        if spent > depth.warm_s and abs(now - before) < _STEADY * now:
            return
        before = now


class _CpuSampler:
    how = "clock"

    def __init__(self, arm: Arm, cold: bool, turn_ms: float) -> None:
        self.arm, self.turn_ms, self.calls = arm, turn_ms, 0
        self.flush = torch.empty(_CPU_FLUSH_BYTES // 4 if cold else 0)

    def block(self, meanwhile: Callable[[], object]) -> float:
        """The caches are overwritten before each call: that counts as part of the turn, not of the call."""
        began, spent, calls = time.perf_counter(), 0.0, 0
        while calls < _CPU_CALLS or (time.perf_counter() - began) * 1e3 < self.turn_ms:
            self.flush.fill_(self.calls + calls)
            start = time.perf_counter()
            self.arm(0)
            spent += time.perf_counter() - start
            calls += 1
        self.calls += calls
        return spent * 1e3 / calls


def _cpu_sampler(arm: Arm, cold: bool, depth: Depth) -> _CpuSampler:
    _keep_freed_memory()
    sampler = _CpuSampler(arm, cold, depth.turn_ms)
    sampler.block(lambda: None)  # compiles, wakes threads
    return sampler


@functools.cache
def _keep_freed_memory() -> None:
    """glibc returns large blocks to the system, and each call would fault its output in anew: 8 of 10 ms for 32 MiB."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        mmap, trim = -3, -1  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
        if libc.mallopt(mmap, 2**30) or libc.mallopt(mmap, 2**25):  # an older glibc takes no more than 32 MiB
            libc.mallopt(trim, 2**30)


class _GraphSampler:
    how = "graph"

    def __init__(self, graph: torch.cuda.CUDAGraph, calls: int, turn_ms: float) -> None:
        self.graph, self.calls = graph, calls
        _elapsed(graph.replay)
        self.replays = max(math.ceil(turn_ms / max(_elapsed(graph.replay), 1e-3)), 1)

    def block(self, meanwhile: Callable[[], object]) -> float:
        ms = _elapsed(self._replay, meanwhile)
        return ms / (self.replays * self.calls)

    def _replay(self) -> None:
        for _ in range(self.replays):
            self.graph.replay()


class _EventSampler:
    how = "events"

    def __init__(self, arm: Arm, sets: int, calls: int, turns: int) -> None:
        self.arm, self.sets, self.calls, self.turns = arm, sets, calls, turns
        self.next = 0  # all sets come round, not the first few again and again

    def block(self, meanwhile: Callable[[], object]) -> float:
        total = 0.0
        for _ in range(self.turns):
            torch.cuda._sleep(_SLEEP_CYCLES)
            total += _elapsed(self._call, meanwhile)
        return total / (self.turns * self.calls)

    def _call(self) -> None:
        for _ in range(self.calls):
            self.arm(self.next % self.sets)
            self.next += 1


def _gpu_sampler(arm: Arm, sets: int, device: torch.device, depth: Depth) -> _Sampler:
    with torch.cuda.device(device):
        _elapsed(lambda: arm(0))  # compiles
        for i in range(1, sets):  # what `peers.Saved` finds out of a set it finds now, not in the graph
            arm(i)
        torch.cuda._sleep(_SLEEP_CYCLES)  # else five short calls would last as long as the host takes to make them
        each = max(_elapsed(lambda: [arm(i % sets) for i in range(5)]) / 5, 1e-3)
        calls = max(sets, min(1000, math.ceil(_GRAPH_MS / each)))
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                for i in range(calls):
                    arm(i % sets)
        except RuntimeError:  # this arm synchronises or uses a stream of its own; its row says "events"
            _end_failed_capture(device)
            calls = min(calls, 20)
            return _EventSampler(arm, sets, calls, max(math.ceil(depth.turn_ms / (calls * each)), 1))
        return _GraphSampler(graph, calls, depth.turn_ms)


def _end_failed_capture(device: torch.device) -> None:
    """A failed capture leaves torch's generator waiting for its end, and random numbers fail: a good one ends it."""
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device=device)


def _elapsed(work: Callable[[], object], meanwhile: Callable[[], object] = lambda: None) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    meanwhile()
    end.synchronize()
    return float(start.elapsed_time(end))
