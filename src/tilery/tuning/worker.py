"""Checks and times candidates in a child: one that crashes, hangs or spoils its CUDA context costs only itself."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

import torch

from tilery.measure.child import Child, Died, Silent, relay, serve
from tilery.tuning.data import GOOD, Candidate, Job, Measured

Progress = Callable[[Candidate | None, str], None]  # (candidate, what is under way); None: no candidate's doing

_START_S = 120.0  # importing torch on a busy machine is no candidate's silence
_TRIES = 2


class Measurer(Protocol):
    """What the tuner needs of a worker, whichever process or machine it is in. It takes one job at a time."""

    def start(self) -> None:
        """Gets ready while compilers work; need not be called."""

    def measure(self, job: Job, progress: Progress) -> list[Measured]: ...

    def close(self) -> None: ...


class Worker:
    """A child process for one device, started with the first job and kept for the next. A context manager."""

    def __init__(self, device: str, silence_s: float = 300.0) -> None:
        """`silence_s`: a candidate that does not come forward for so long hangs."""
        self.device, self.silence_s = device, silence_s
        self._child = Child("tilery.tuning.worker", silence_s)
        self._waking = False

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Importing torch and opening a GPU take seconds: the child does it while compilers work."""
        if not self._waking:
            self._waking = True
            self._child.send(None)

    def close(self) -> None:
        self._waking = False
        self._child.close()

    def _woken(self) -> None:
        if self._waking:
            self._waking = False
            self._child.timeout_s = max(_START_S, self.silence_s)
            with contextlib.suppress(Died):  # the job that is sent next says why
                self._child.receive()

    def measure(self, job: Job, progress: Progress = lambda candidate, what: None) -> list[Measured]:
        """One for every candidate, in the job's order, measured on this worker's device.

        `against` is of the job's first or, where that is bad, of the first good one. A candidate that ends the process
        or is silent for too long is tried once more; then it is "crashed" or "hung", and the others go on without it.
        What is wrong with the problem itself is raised.
        """
        job = replace(job, problem=replace(job.problem, device=self.device))
        self._woken()
        results: dict[int, Measured] = {}
        deaths: Counter[int | None] = Counter()
        while left := [i for i in range(len(job.candidates)) if i not in results]:
            part = _Part(job, left, progress)
            try:
                part.run(self._child, self.silence_s)
                results |= part.found
            except Died as died:
                results |= part.bad()
                deaths[part.at] += 1
                if deaths[part.at] == _TRIES:
                    results = part.blamed(died) | results
                progress(None, "its process ended")  # raises if all is to stop: then no other is started
            except BaseException:  # Ctrl-C, a bad problem: what the child still says is of no job to come
                self.close()
                raise
        return [results[i] for i in range(len(job.candidates))]


class _Part:
    """What is left of a job, and how far it came."""

    def __init__(self, job: Job, left: list[int], progress: Progress) -> None:
        self.job, self.left, self.progress = job, left, progress
        self.found: dict[int, Measured] = {}
        self.at: int | None = None  # the candidate under way

    def run(self, child: Child, silence_s: float) -> None:
        child.send(replace(self.job, candidates=tuple(self.job.candidates[i] for i in self.left)))
        child.timeout_s = max(_START_S, silence_s)
        while (message := child.receive()) is not None:
            child.timeout_s = silence_s
            if isinstance(message, Exception):
                raise message
            number, said = message
            at = None if number is None else self.left[number]
            if isinstance(said, Measured):
                assert at is not None
                self.found[at] = said
            else:
                self.at = at
                self.progress(None if at is None else self.job.candidates[at], said)
        assert sorted(self.found) == self.left, "every candidate has an answer"

    def bad(self) -> dict[int, Measured]:
        """What need not be done again; good ones were timed beside one that is to be timed anew."""
        return {i: found for i, found in self.found.items() if found.status != GOOD}

    def blamed(self, died: Died) -> dict[int, Measured]:
        """The candidate under way; all that are left where there was none."""
        status, reason = "hung" if isinstance(died, Silent) else "crashed", str(died)
        if self.at is None:
            reason = f"the job was given up, it failed before or between its candidates: {died}"
        which = self.left if self.at is None else [self.at]
        return {i: Measured(self.job.candidates[i], status, reason) for i in which}


def _measured(job: Job | None, progress: Callable[[int | None, str], None]) -> Iterator[tuple[int, Measured]]:
    """In the child: (number, Measured) for each candidate."""
    from tilery.tuning import measure

    if job is not None:
        yield from measure.measured(job, progress)
    elif torch.cuda.is_available():  # to be awake
        torch.cuda.init()


if __name__ == "__main__":
    serve(relay(_measured))
