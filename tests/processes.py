"""Processes that tests start: what only they see, and how long one may hang before a test gives up."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

HANG_S = 240  # no test waits for it: a process that is still silent then will be silent for ever

# A module for a child: from the first call of a kernel that passes time on, the timer's clock is that of these kernels.
# Nobody waits, and load does not matter.
CLOCK = """
import time, types
from tilery.measure import timing

now = [None]
timing.time = types.SimpleNamespace(perf_counter=lambda: time.perf_counter() if now[0] is None else now[0])
timing._CPU_FLUSH_BYTES = 4096

def passes(ms):
    now[0] = (now[0] or 0.0) + ms / 1e3
"""


def wait_for(condition: Callable[[], object]) -> None:
    """Until another process has done something, which leaves a trace in a file."""
    end = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < end, "it hangs"
        time.sleep(0.02)


def package(folder: Path, entry_points: str, **packages: dict[str, str]) -> str:
    """Packages as pip would install them: modules by name, and what they have for tilery. Gives the PYTHONPATH."""
    for name, modules in packages.items():
        (folder / name).mkdir()
        for module, text in modules.items():
            (folder / name / f"{module}.py").write_text(text)
    info = folder / "planted-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1\n")
    (info / "entry_points.txt").write_text(entry_points)
    return os.pathsep.join([str(folder), *filter(None, sys.path)])
