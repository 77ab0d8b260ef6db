"""Finds the fastest kernel and config for a problem, proves it right, and keeps it with its evidence."""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilery.base.spec import Case
    from tilery.core.op import Op
    from tilery.tuning.tuner import Status, TuneResult


def tune(
    op: "str | Op | Sequence[str | Op] | None" = None,
    *,
    cases: "Sequence[Case] | None" = None,
    shapes: str | None = None,
    model: str | None = None,
    tp: int = 1,
    rows: Sequence[int] | None = None,
    backend: str | Sequence[str] | None = None,
    budget: str | float = "10m",
    search: str = "halving",
    bits: str = "any",
    gpus: Sequence[int] | None = None,
    num_gpus: int | None = None,
    timeout: float = 60.0,
    config_dir: str | Path | None = None,
    use: str | None = None,
    progress: "Callable[[Status], None]" = lambda status: None,
) -> "TuneResult":
    """Tunes an op for cases, a named set of shapes or a model (then op may be left out), and keeps what won.

    `rows` are those of a model's products, if not the usual ones. `use="sglang"` keeps what SGLang's kernels can run,
    for its files alone.
    """
    from tilery.base import settings
    from tilery.tuning import request
    from tilery.tuning.tuner import Tuner

    work = request.work(op, cases, shapes, model, tp, rows)
    asked = request.request(work, [backend] if isinstance(backend, str) else backend, budget, search, bits, use)
    with nullcontext() if config_dir is None else settings.override(config_dir=request.folder(config_dir)):
        pool = request.pool_for(asked, gpus, num_gpus, timeout)
        try:
            return Tuner(asked, pool, progress).run()
        finally:
            pool.close()


class _Tuning(ModuleType):
    """This package, which is also what `with tilery.tuning(budget="60s"):` calls."""

    def __call__(self, budget: str | float = "60s", **options: Any) -> AbstractContextManager[None]:
        """Inside, a call whose bucket has no tuned entry is tuned first, and the entry kept."""
        from tilery.tuning.first_calls import tuning

        return tuning(budget, **options)


sys.modules[__name__].__class__ = _Tuning
