"""`with tilery.tuning():` a call whose bucket has no tuned entry is tuned before it runs."""

import contextlib
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilery.base.errors import BadInput, require
from tilery.core import policy
from tilery.core.op import Op
from tilery.core.plan import drop_plans
from tilery.measure.place import chosen_kernels
from tilery.tuning.data import Problem
from tilery.tuning.pool import SILENCE_S, LocalPool
from tilery.tuning.record import present
from tilery.tuning.request import seconds
from tilery.tuning.tuner import Request, Tuner


@contextlib.contextmanager
def tuning(
    budget: str | float = "60s", *, search: str = "halving", bits: str = "any", timeout: float = SILENCE_S
) -> Iterator[None]:
    """The budget is for all buckets together; once it is spent, calls run as they would without this."""
    require(policy.before_plan is None, "tilery.tuning is for one block at a time, got one inside another")
    first = _FirstCalls(Request((), {}, seconds(budget), search, bits), timeout)
    policy.before_plan = first
    drop_plans()  # calls that were decided before are looked at again
    try:
        yield
    finally:
        policy.before_plan = None
        first.close()


class _FirstCalls:
    """Asked by dispatch before it decides a new plan."""

    def __init__(self, asked: Request, silence_s: float) -> None:
        self._asked, self._silence_s, self._end = asked, silence_s, time.monotonic() + asked.budget_s
        self._pools: dict[str, LocalPool] = {}
        self._tried: set[tuple[Any, ...]] = set()
        self._lock = threading.Lock()  # one is tuned at a time; another thread's call waits

    def __call__(self, op: Op, args: tuple[Any, ...], backend: str | None, config: Any) -> None:
        if config is not None or (backend is not None and backend not in op.kernels):
            return
        try:
            call = op.call(op.specs(args))
        except BadInput:
            return  # the plan that is made next says what is wrong
        where = next(a.device for a in args if isinstance(a, Tensor))
        if where.type not in ("cpu", "cuda") or (where.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return
        kernels = chosen_kernels(op, None if backend is None else [backend])
        bucket = op.bucket(call)
        with self._lock:
            key = op.name, str(where), bucket.exact, *sorted(bucket.scaled.items()), kernels
            known = any(e.kernel in kernels for e in present(op, bucket, where))
            if known or key in self._tried:
                return
            self._tried.add(key)
            self._tune(op, args, kernels, where)

    def _tune(self, op: Op, args: tuple[Any, ...], kernels: tuple[str, ...], where: torch.device) -> None:
        left = self._end - time.monotonic()
        if left <= 0:
            warnings.warn(f"{op.name}: the budget of tilery.tuning is spent, the call runs untuned", stacklevel=4)
            return
        if str(where) not in self._pools:
            self._pools[str(where)] = LocalPool([str(where)], self._silence_s)
        pool = self._pools[str(where)]
        with tempfile.TemporaryDirectory(prefix="tilery-") as folder:
            saved = Path(folder) / "arguments.pt"
            torch.save(tuple(a.detach() if isinstance(a, Tensor) else a for a in args), saved)
            problem = Problem(op.name, str(where), saved=str(saved))
            asked = replace(self._asked, problems=(problem,), kernels={op.name: kernels}, budget_s=left)
            result = Tuner(asked, pool).run()
        for done in result.tuned:
            if not done.entries:
                bad = [*done.outcome.measured, *done.left_out]
                reasons = "".join(f"\n  {m.candidate}: {m.status}: {m.reason}" for m in bad)
                warnings.warn(f"{op.name}: nothing could be tuned, the call runs untuned:{reasons}", stacklevel=4)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
