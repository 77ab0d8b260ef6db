"""The rows of one run, kept as they are measured."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch

from tilery.base.spec import Artifact
from tilery.hardware import device
from tilery.measure import ceilings, inspect
from tilery.measure.place import describe
from tilery.measure.result import Row
from tilery.measure.store import Store, command_line

_KEPT_STAGES = ("cuda", "ptx", "sass", "asm")


class Recorder:
    """The rows of one run, in the store before the next is measured."""

    def __init__(
        self, store: Store, devices: Iterable[torch.device], protocol: str, say: ceilings.Say = ceilings.silent,
        more: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.store, self.rows, self.protocol = store, list[Row](), protocol
        self._start, self._end = time.monotonic(), 0.0
        roofs = {device.name(where): asdict(ceilings.ceilings(where, say=say)) for where in devices}
        self.id = store.start(command_line(), {"ceilings": roofs, "protocol": self.protocol} | (more or {}))

    @property
    def minutes(self) -> float:
        """How long it took, ceilings and compilers included."""
        return ((self._end or time.monotonic()) - self._start) / 60

    @property
    def made_by(self) -> str:
        return f"{self.protocol}, {self.minutes:.1f} minutes in all"

    def add(self, *rows: Row) -> None:
        self.rows += rows
        self.store.add(self.id, *rows)

    @contextmanager
    def running(self) -> Iterator[None]:
        """The run is finished when the block ends; a Ctrl-C inside says what is kept of it."""
        try:
            yield
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"{len(self.rows)} rows are kept as run {self.id}") from None
        self._end = time.monotonic()
        self.store.finish(self.id)

    def keep_code(self, artifact: Artifact) -> str:
        return self.store.add_code(kept_code(artifact))

    def describe(self, like: Row, artifact: Artifact, code: dict[str, str]) -> None:
        """Every row of this kernel, config and case; `code` is what is kept of it."""
        kept = self.store.add_code(code)
        for n, row in enumerate(self.rows):
            if kind_of(row) == kind_of(like):
                describe(row, artifact, kept)
                self.store.replace(self.id, n, row)


def kept_code(artifact: Artifact) -> dict[str, str]:
    """The text of each stage that a run keeps. To print machine code takes a second, in a process of its own."""
    return {stage: inspect.stage(artifact, stage) for stage in inspect.stages(artifact) if stage in _KEPT_STAGES}


def kind_of(row: Row) -> tuple[str, ...]:
    """Rows of which a compiler makes the same; a case may change the code though its config is the same."""
    return row.op, row.kernel, row.config, row.case
