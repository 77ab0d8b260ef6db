"""First calls of the arms of a bench, in several processes, so that compilers use all cores before anything is timed.

What a first call compiles, its language (or torch.compile) keeps on disk, where the process that times finds it.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from tilery.base import settings
from tilery.core.op import REGISTRY
from tilery.hardware import device
from tilery.measure import timing
from tilery.measure.child import Child, Died, relay, serve
from tilery.workbench.bench import Unit, call_of, drawn

Job = tuple[Unit, str]  # an arm of it

_MODULE = "tilery.workbench.first_calls"
_PROCESSES = 8
_ENOUGH = 3  # jobs a process, below which starting it takes longer than it saves
_SILENCE_S = 300.0  # as long as a slow compiler needs


def make(units: Iterable[Unit], say: Callable[[str], None], processes: int | None = None) -> int:
    """Make the first calls of all arms on a GPU, and return how many. One that fails fails again where it is timed."""
    jobs = [(unit, arm) for unit in units if unit.device != "cpu" for arm in (*unit.peers, *unit.kernels)]
    return call_all(jobs, say, min(_PROCESSES, device.cores()) if processes is None else processes)


def call_all(jobs: list[Job], say: Callable[[str], None], processes: int) -> int:
    processes = min(processes, len(jobs) // _ENOUGH)
    if processes < 2:
        return 0
    waiting = deque(jobs)
    children = [Child(_MODULE, _SILENCE_S) for _ in range(processes)]

    def work(child: Child) -> None:
        with contextlib.closing(child), contextlib.suppress(IndexError):
            while True:
                unit, arm = waiting.popleft()
                say(f"first calls, {len(jobs) - len(waiting)} of {len(jobs)}: {unit.op} {unit.case} {arm}")
                with contextlib.suppress(Died):  # the next job gets a process of its own
                    child.send((unit, arm))
                    while child.receive() is not None:
                        pass

    with ThreadPoolExecutor(processes) as pool:
        try:
            list(pool.map(work, children))
        finally:  # before the pool waits for its threads: on Ctrl-C they wait for children
            waiting.clear()
            for child in children:
                child.close()
    return len(jobs)


def call(job: Job, progress: timing.Progress) -> Iterator[None]:
    """In the child: one call of the arm, on inputs of its case."""
    unit, arm = job
    op, where = REGISTRY[unit.op], torch.device(unit.device)
    progress(arm, "first call")  # raises if the call before spoilt the context: this process ends, the next one works
    # What fails here fails again where it is timed, and is a row there.
    with contextlib.suppress(Exception), settings.override(tuned=unit.tuned):
        args = drawn(op, unit.case, where, 0)
        call_of(op, arm, args)(*args)
        if where.type == "cuda":
            torch.cuda.synchronize()
    yield from ()


if __name__ == "__main__":
    serve(relay(call))
