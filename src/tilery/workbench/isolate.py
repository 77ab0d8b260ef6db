"""Measures in a child process: an arm that crashes or spoils the GPU's context costs its own row; the rest goes on."""

from collections.abc import Generator, Iterator

from tilery.measure import timing
from tilery.measure.child import Child, Died, relay, serve
from tilery.measure.result import Row
from tilery.workbench import bench

_SILENCE_S = 300.0  # a block lasts milliseconds, a compiler's slowest kernel a minute


def measured(
    units: list[bench.Unit], progress: timing.Progress = lambda arm, what: None
) -> Generator[Iterator[Row], None, None]:
    """The rows of every unit, unit by unit. One is measured anew without the arm that killed its process."""
    child = Child("tilery.workbench.isolate", _SILENCE_S)
    try:
        for unit in units:
            yield rows_of(child, unit, progress)
    finally:
        child.close()


def rows_of(child: Child, unit: bench.Unit, progress: timing.Progress) -> Iterator[Row]:
    given: set[str] = set()
    while True:
        at = ""
        child.send(unit)
        try:
            while (message := child.receive()) is not None:
                if isinstance(message, Exception):
                    raise message
                if isinstance(message, Row):
                    if message.kernel not in given:
                        given.add(message.kernel)
                        yield message
                else:
                    at, what = message
                    progress(at, f"{unit.op} {unit.case}: {at} {what}")
            return
        except Died as died:
            if at not in (*unit.kernels, *unit.peers):  # a control, or no arm at all: there is none to leave out
                where = f"at {at}" if at else "before or between the arms"
                yield Row(unit.op, "(all)", str(unit.case), "fail", f"the case was given up, it failed {where}: {died}")
                return
            given.add(at)
            yield Row(unit.op, at, str(unit.case), "fail", f"crashed, the others went on without it: {died}")
            unit = unit.without({at})


if __name__ == "__main__":
    serve(relay(bench.measure))
