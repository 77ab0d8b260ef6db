"""Many GPUs: a Ray actor for each, and Ray's tasks to compile. One GPU needs none of it.

A candidate that crashes or hangs costs the child inside its actor, as it does without Ray. What is met here is an actor
that dies itself: with its node, by force, or out of memory.
"""

import functools
import os
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import torch

from tilery.base.errors import CompileFailed, TileryError, ToolMissing, require
from tilery.hardware import device as devices
from tilery.measure.compile import Compiler
from tilery.tuning.data import Built, Candidate, Job, Measured
from tilery.tuning.pool import SILENCE_S
from tilery.tuning.worker import Measurer, Progress, Worker

_START_S = 180.0  # a node imports torch within seconds; longer, and the GPU is someone else's
_CLOSE_S = 5.0
_MOST_COMPILERS = 64

Make = Callable[[str, float], Measurer]


class RayPool:
    """A Pool of `num_gpus` workers, on this machine or wherever the cluster has GPUs; None: all that it has."""

    def __init__(
        self, num_gpus: int | None = None, device: str = "cuda:0", silence_s: float = SILENCE_S, make: Make = Worker
    ) -> None:
        """`device` as an actor sees it: Ray shows each one its own GPU alone, as the first."""
        self._ray = _ray()
        self._owns = not self._ray.is_initialized()
        if self._owns:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # what is tuned here is told to nobody
            self._ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        self.workers: list[RayWorker] = []
        try:
            count = _checked_count(num_gpus, self._ray.cluster_resources())
            self.workers = [RayWorker(self._ray, device, silence_s, make) for _ in range(count)]
            _require_alike(device, [worker.device_name() for worker in self.workers])
        except BaseException:
            self.close()
            raise
        self.compilers = max(1, min(_MOST_COMPILERS, int(self._ray.cluster_resources().get("CPU", 1))))
        self._task = self._ray.remote(num_cpus=1, max_retries=1)(_compiled)

    def compile(self, op: str, kernel: str, specs: tuple[Any, ...], arch: str, config: Any) -> Built:
        failures = self._ray.exceptions
        try:
            return self._ray.get(self._task.remote(op, kernel, specs, arch, config))  # type: ignore[no-any-return]
        except (failures.WorkerCrashedError, failures.OutOfMemoryError) as error:
            return Built(failure=f"the task that compiled it died: {error}")

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        if self._owns and self._ray.is_initialized():
            self._ray.shutdown()


class RayWorker:
    """A Measurer in an actor that has a GPU to itself. One that dies is replaced, and its job done anew, once."""

    def __init__(self, ray: Any, device: str, silence_s: float, make: Make) -> None:
        self._ray, self._given = ray, (device, silence_s, make)
        # Two at a time: it is told to close while it measures. No core is asked for: compilers would have them all.
        self._kind = ray.remote(num_gpus=1, num_cpus=0, max_concurrency=2, max_restarts=0)(_Actor)
        self._lock, self._closed = threading.Lock(), False
        self._actor = self._kind.remote(*self._given)

    def device_name(self) -> str:
        """Waits until the actor is there."""
        try:
            return str(self._ray.get(self._actor.device_name.remote(), timeout=_START_S))
        except self._ray.exceptions.GetTimeoutError:
            raise TimeoutError(
                f"Ray gave no GPU to a worker within {_START_S:.0f} s: wait for other jobs of the cluster, or ask for "
                "fewer with --num-gpus (`ray status` shows who has them)"
            ) from None

    def start(self) -> None:
        """Its actor is there already; the actor's own child starts with the first job."""

    def measure(self, job: Job, progress: Progress = lambda candidate, what: None) -> list[Measured]:
        """Measure a job as Worker does. From the second death on, the candidate that was under way is "crashed"."""
        lost: list[Measured] = []
        deaths = 0
        while left := tuple(c for c in job.candidates if c not in [one.candidate for one in lost]):
            under_way: list[Candidate | None] = [None]
            try:
                found = self._answer(replace(job, candidates=left), progress, under_way)
                return _in_order(job, [*found, *lost])
            except self._ray.exceptions.RayActorError as error:
                self._replace(error)
                deaths += 1
                progress(None, f"its worker died: {error}; a new one takes its place")
                if deaths > 1:
                    blamed = left if under_way[0] is None else (under_way[0],)
                    lost += [Measured(c, "crashed", f"its Ray actor died twice: {error}") for c in blamed]
        return _in_order(job, lost)

    def _answer(self, job: Job, progress: Progress, under_way: list[Candidate | None]) -> list[Measured]:
        for reference in self._actor.measure.options(num_returns="streaming").remote(job):
            message = self._ray.get(reference)
            if isinstance(message, Exception):
                raise message
            if isinstance(message, list):
                return message
            under_way[0] = message[0]
            progress(*message)
        raise AssertionError("the actor ended its answer without a result")

    def _replace(self, error: Exception) -> None:
        with self._lock:
            if self._closed:
                raise error
            self._ray.kill(self._actor)  # it may only be out of reach, and still have its GPU
            self._actor = self._kind.remote(*self._given)
        self.device_name()

    def close(self) -> None:
        with self._lock:
            closed, self._closed = self._closed, True
        if closed or not self._ray.is_initialized():
            return
        self._ray.wait([self._actor.close.remote()], timeout=_CLOSE_S)  # else its child would go on with the GPU
        self._ray.kill(self._actor)


class _Actor:
    """In a process of Ray's: a worker, and what it says as it goes."""

    def __init__(self, device: str, silence_s: float, make: Make) -> None:
        self._device, self._worker = device, make(device, silence_s)

    def device_name(self) -> str:
        return devices.name(torch.device(self._device))

    def measure(self, job: Job) -> Iterator[Any]:
        """(candidate, what) as it goes, then the list of what was found, or the error that ended it."""
        said: SimpleQueue[Any] = SimpleQueue()

        def work() -> None:
            try:
                said.put(self._worker.measure(job, lambda candidate, what: said.put((candidate, what))))
            except Exception as error:
                if not isinstance(error, TileryError):
                    error.add_note(traceback.format_exc())  # where it was raised is lost on the way
                said.put(error)

        threading.Thread(target=work, daemon=True).start()
        message: Any = (None, "")
        while isinstance(message, tuple):
            message = said.get()
            while isinstance(message, tuple) and not said.empty():  # only the latest counts
                message = said.get()
            yield message

    def close(self) -> None:
        self._worker.close()


def _compiled(op: str, kernel: str, specs: tuple[Any, ...], arch: str, config: Any) -> Built:
    """A task of Ray's."""
    try:
        made = _compiler().compile(op, kernel, specs, arch, config)
    except CompileFailed as error:
        return Built(failure=str(error))
    return Built(made.registers, made.spills, made.shared)


@functools.cache
def _compiler() -> Compiler:
    """Kept as long as Ray keeps the process: starting one costs an import of torch."""
    return Compiler()


def _in_order(job: Job, found: list[Measured]) -> list[Measured]:
    return [next(one for one in found if one.candidate == candidate) for candidate in job.candidates]


def _checked_count(asked: int | None, resources: dict[str, float]) -> int:
    there = int(resources.get("GPU", 0))
    require(there > 0, "Ray's cluster must have a GPU, got none (`ray status` shows what it has)")
    require(
        asked is None or 1 <= asked <= there, f"num_gpus must be between 1 and the {there} of the cluster, got {asked}"
    )
    return there if asked is None else asked


def _require_alike(device: str, theirs: list[str]) -> None:
    """What is tuned is kept for one kind of device."""
    here = devices.name(torch.device(device))
    others = sorted({name for name in theirs if name != here})
    require(
        not others, f"every worker's device must be the {here} of this process, got {', '.join(others)} in the cluster"
    )


def _ray() -> Any:
    try:
        import ray
        import ray.exceptions
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ToolMissing(
            "tuning on several GPUs needs ray, which is not installed: pip install 'tilery[ray]'"
        ) from None
    return ray
