"""Tunes problems one after another on every worker: compiles ahead, measures, keeps what was found at once."""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from tilery.base import settings
from tilery.base.errors import NotWritten
from tilery.core import tuned
from tilery.hardware import device
from tilery.measure.recorder import Recorder
from tilery.measure.store import Store
from tilery.tuning import candidates, journal, search
from tilery.tuning.data import GOOD, Built, Candidate, Job, Measured, Problem
from tilery.tuning.pool import Pool
from tilery.tuning.record import Recorded
from tilery.tuning.search import Outcome
from tilery.tuning.worker import Measurer

_GLANCE_S = 0.2  # after which the main thread looks whether it was interrupted


@dataclass(frozen=True)
class Request:
    """What to tune, the most valuable first, and how."""

    problems: tuple[Problem, ...]
    kernels: dict[str, tuple[str, ...]]  # of every op
    budget_s: float  # after it no new problem is begun, and searches come to their end
    search: str = "halving"
    bits: str = "any"


@dataclass(frozen=True)
class Status:
    """How far it is, for whoever looks on."""

    problem: str
    done: int  # candidates measured of the problem under way
    candidates: int
    best: str  # the fastest so far
    what: str
    problems_done: int
    problems: int
    left_s: float


@dataclass
class Tuned:
    """One problem, finished: what was found of its candidates, and where the entries are."""

    problem: Problem
    name: str
    outcome: Outcome
    left_out: list[Measured]
    entries: list[tuned.Entry] = field(default_factory=list)
    path: Path | None = None


@dataclass
class TuneResult:
    """Everything that a tune found. Times are those of this run; what an earlier one had measured is not in them."""

    tuned: list[Tuned]
    not_reached: list[Problem]  # for want of time: the same command goes on with them
    run: str  # in the store
    wall_s: float = 0.0
    compile_s: float = 0.0  # while at least one compiler was at work
    measure_s: float = 0.0  # while at least one worker was

    @property
    def overlap(self) -> float | None:
        """Wall time over the longer of compiling and measuring: 1 where neither waits for the other."""
        longest = max(self.compile_s, self.measure_s)
        return self.wall_s / longest if longest else None


class Stopped(Exception):
    """Inside a worker's thread: another one failed, or the user has had enough."""


class _Task:
    """A problem on its way."""

    def __init__(self, problem: Problem, kernels: tuple[str, ...]) -> None:
        self.recorded = Recorded(problem)
        self.problem, self.op, self.kernels = problem, self.recorded.op, kernels
        self.candidates, self.left_out = candidates.collect(problem, kernels, self.recorded.imported())
        self.builds: list[Future[Built]] = []
        self.deadline = 0.0
        where = self.recorded.where
        self.versions = {f"{k} {n}": v for k in kernels for n, v in tuned.versions(k, where).items()}
        named = (self.op.name, self.recorded.slug, self.recorded.name, self.recorded.specs, kernels)
        self.key = journal.key_of(*named, *([problem.use] if problem.use else []))
        self.jobs: list[Job] = []
        self.seen: set[str] = set()
        self.best: Measured | None = None

    @property
    def present(self) -> int | None:
        """The candidate that is tuned now."""
        now = next(iter(self.recorded.present()), None)
        mine = [(i, c) for i, c in enumerate(self.candidates) if now is not None and c.kernel == now.kernel]
        if now is None or not mine:
            return None
        fields = tuned.present_fields(self.op.kernel(now.kernel).Config, now.config)
        return next((i for i, c in mine if c.config == fields), None)


class Tuner:
    def __init__(
        self,
        request: Request,
        pool: Pool,
        progress: Callable[[Status], None] = lambda status: None,
        store: Store | None = None,
        ahead: bool | None = None,
    ) -> None:
        """`ahead`: whether compilers run before and beside the measuring. None: not on a CPU, which does both jobs."""
        self.request, self.pool, self.progress, self.ahead = request, pool, progress, ahead
        self.store = store or Store()
        self._compiling, self._measuring = _Clock(), _Clock()
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._finished: dict[str, Tuned] = {}
        self._failure: BaseException | None = None

    def run(self) -> TuneResult:
        """Raises what stopped it; what was finished until then is kept, and the same request goes on from there."""
        tasks = [_Task(p, p.kernels or self.request.kernels[p.op]) for p in self.request.problems]
        self._tasks, self._waiting = tasks, deque(tasks)
        self._journals = self._opened(tasks)
        self._recorder = Recorder(self.store, sorted({t.recorded.where for t in tasks}, key=str), "tuning")
        self._compilers = ThreadPoolExecutor(max(self.pool.compilers, 1))
        start = time.monotonic()
        self._end = start + self.request.budget_s
        if any(t.key not in self._journals[t.op.name].outcomes for t in tasks):
            for worker in self.pool.workers:
                worker.start()
        self._compile_ahead()
        self._work_all()
        self._compilers.shutdown(wait=False, cancel_futures=True)
        not_reached = [t.problem for t in tasks if t.key not in self._finished]
        if not not_reached:
            for each in self._journals.values():
                each.done()
        self.store.finish(self._recorder.id)
        done = [self._finished[t.key] for t in tasks if t.key in self._finished]
        times = time.monotonic() - start, self._compiling.total, self._measuring.total
        return TuneResult(done, not_reached, self._recorder.id, *times)

    @property
    def finished(self) -> list[Tuned]:
        return list(self._finished.values())

    def _opened(self, tasks: list[_Task]) -> dict[str, journal.Journal]:
        """Open a journal for every op; a folder that cannot be written is an error now, not after the first hour."""
        request, folder = self.request, settings.get().config_dir
        session = journal.key_of(request.search, request.bits, [t.key for t in tasks])
        slugs = {t.op.name: t.recorded.slug for t in tasks}
        return {op: journal.Journal(folder, op, slug, session) for op, slug in slugs.items()}

    # Compiling

    def _compile_ahead(self) -> None:
        for task in self._tasks:
            known = self._journals[task.op.name].outcomes.get(task.key)
            if known is None and self._ahead(task):
                task.builds = [self._compilers.submit(self._compile, task, c) for c in task.candidates]

    def _ahead(self, task: _Task) -> bool:
        return task.recorded.where.type == "cuda" if self.ahead is None else self.ahead

    def _compile(self, task: _Task, candidate: Candidate) -> Built:
        config = task.op.kernel(candidate.kernel).Config(**candidate.config)
        arch = device.arch(task.recorded.where)
        with self._compiling:
            return self.pool.compile(task.op.name, candidate.kernel, task.recorded.specs, arch, config)

    # Measuring

    def _work_all(self) -> None:
        with ThreadPoolExecutor(len(self.pool.workers)) as threads:
            work = [threads.submit(self._work, worker) for worker in self.pool.workers]
            try:
                # Ctrl-C wakes a wait without end only where the system hands it to this thread, not to a library's.
                while wait(work, _GLANCE_S, FIRST_EXCEPTION).not_done and self._failure is None:
                    pass
            except KeyboardInterrupt:
                self._end_all()
                raise
            if self._failure is not None:
                self._end_all()
        if self._failure is not None:
            raise self._failure

    def _end_all(self) -> None:
        """So that no thread is waited for."""
        self._stop.set()
        self._compilers.shutdown(wait=False, cancel_futures=True)
        self.pool.close()

    def _work(self, worker: Measurer) -> None:
        try:
            while self._next(worker):
                pass
        except BaseException as error:
            with self._lock:
                if not self._stop.is_set() and self._failure is None:  # else it comes of being stopped
                    self._failure = error
            raise

    def _next(self, worker: Measurer) -> bool:
        """One problem; False if none is left."""
        with self._lock:
            if not self._waiting or self._stop.is_set():
                return False
            task, left = self._waiting.popleft(), self._end - time.monotonic()
            share = left * len(self.pool.workers) / (len(self._waiting) + 1)
            task.deadline = min(time.monotonic() + share, self._end)
        book = self._journals[task.op.name]
        known = book.outcomes.get(task.key)
        if known is not None:
            self._keep(task, known)
        elif left > 0:
            outcome = self._search(task, worker)
            self._keep(task, outcome)
            book.add_outcome(task.key, outcome)
        return True

    def _search(self, task: _Task, worker: Measurer) -> Outcome:
        rules = search.Rules(
            built=lambda i: task.builds[i].result() if task.builds else Built(),
            late=lambda: time.monotonic() > task.deadline,
            search=self.request.search, bits=self.request.bits, present=task.present,
        )  # fmt: skip
        playing = search.run(task.problem, task.candidates, rules)
        try:
            job = next(playing)
            while True:
                job = playing.send(self._measured(task, worker, job))
        except StopIteration as end:
            outcome: Outcome = end.value
            return outcome

    def _measured(self, task: _Task, worker: Measurer, job: Job) -> list[Measured]:
        """From the journal, or measured and in the journal before anything else happens."""
        book, same = self._journals[task.op.name], sum(job == other for other in task.jobs)
        key = journal.job_key(task.key, task.versions, job, same)
        task.jobs.append(job)
        found = book.jobs.get(key)
        if found is None:

            def progress(candidate: Candidate | None, what: str) -> None:
                if self._stop.is_set():
                    raise Stopped
                self._say(task, f"{candidate or ''} {what}".strip())

            with self._measuring:
                found = worker.measure(job, progress)
            if self._stop.is_set():
                raise Stopped  # what was closed under its hands may have failed for that
            book.add_job(key, found)
        good = [m for m in found if m.status == GOOD]
        task.seen |= {str(m.candidate) for m in found}
        task.best = min([*good, *([task.best] if task.best else [])], key=lambda m: m.slower, default=None)
        self._say(task, "")
        return found

    def _say(self, task: _Task, what: str) -> None:
        best = f"{task.best.candidate} {task.best.ms:.4g} ms" if task.best else ""
        left = max(0.0, self._end - time.monotonic())
        self.progress(
            Status(
                f"{task.op.name} {task.recorded.name}", len(task.seen), len(task.candidates), best, what,
                len(self._finished), len(self._tasks), left,
            )
        )  # fmt: skip

    # Keeping

    def _keep(self, task: _Task, outcome: Outcome) -> None:
        done = Tuned(task.problem, task.recorded.name, outcome, task.left_out)
        with self._lock:
            if outcome.ranked:
                done.entries = task.recorded.entries(outcome, task.kernels)
                try:
                    done.path = tuned.write(task.op, task.recorded.slug, done.entries, task.recorded.folder)
                except NotWritten as error:
                    raise NotWritten(f"{error}. What was measured is kept: the same command goes on from it") from None
            self._recorder.add(*task.recorded.rows(outcome, task.left_out))
            self._finished[task.key] = done
        self._say(task, "kept")


class _Clock:
    """How long at least one was inside."""

    def __init__(self) -> None:
        self.total, self._inside, self._since, self._lock = 0.0, 0, 0.0, threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            self._since = self._since if self._inside else time.monotonic()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            self.total += 0.0 if self._inside else time.monotonic() - self._since
