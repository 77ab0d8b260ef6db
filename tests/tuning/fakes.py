"""Workers and pools that measure nothing: times are given, with noise of a seed, and failures by name.

None of them waits by itself: what a test wants to happen meanwhile it does in `before`.
"""

import dataclasses
import random
import threading

from tilery.tuning.data import GOOD, Built, Candidate, Measured

LANGUAGES = ("triton", "cuda", "numba")


def candidates(count, languages=LANGUAGES):
    """The first of each language is its default."""
    return [Candidate(languages[i * len(languages) // count], {"tile": i}) for i in range(count)]


class FakeWorker:
    """`times`: candidate -> ms. `bad`: candidate -> (status, reason). Every job that it is given is in `jobs`."""

    def __init__(self, times, noise=0.0, seed=0, bad=None, digests=None):
        self.times, self.noise, self.random = times, noise, random.Random(seed)
        self.bad, self.digests = bad or {}, digests or {}
        self.jobs, self.closed = [], False
        self.before = lambda job: None  # called with every job before it is measured

    def start(self):
        pass

    def measure(self, job, progress=lambda candidate, what: None):
        self.jobs.append(job)
        self.before(job)
        good = [c for c in job.candidates if str(c) not in self.bad]
        drawn = {str(c): [self._draw(c) for _ in range(job.depth.rounds)] for c in good}
        for candidate in job.candidates:
            progress(candidate, "timing")
        return [self._measured(c, drawn, drawn[str(good[0])] if good else []) for c in job.candidates]

    def _draw(self, candidate):
        return self.times(candidate) * self.random.lognormvariate(0.0, self.noise)

    def _measured(self, candidate, drawn, against):
        if str(candidate) in self.bad:
            return Measured(candidate, *self.bad[str(candidate)])
        digest = self.digests.get(str(candidate), "same")
        samples = tuple(drawn[str(candidate)])
        return Measured(candidate, GOOD, "", samples, tuple(against), 1e-7, digest != "restless", digest)

    def close(self):
        self.closed = True


class FakePool:
    def __init__(self, workers, compilers=2, built=None):
        self.workers, self.compilers, self.built = workers, compilers, built or {}
        self.compiled, self.closed, self.lock = [], threading.Event(), threading.Lock()
        self.before = lambda config: None  # called with every config before it is compiled

    def compile(self, op, kernel, specs, arch, config):
        self.before(config)
        with self.lock:
            self.compiled.append((op, kernel, config))
        fields = ",".join(f"{k}={v}" for k, v in sorted(dataclasses.asdict(config).items()))
        return self.built.get(f"{kernel} {fields}" if fields else kernel, Built(registers=32, spills=0, shared=0))

    def close(self):
        self.closed.set()
