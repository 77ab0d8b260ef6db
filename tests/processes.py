"""Processes that tests start: what only they see, and how long one may hang before a test gives up."""

import os
import sys
from pathlib import Path

HANG_S = 600  # no test waits for it: a process that is still silent then will be silent for ever


def package(folder: Path, entry_points: str, **modules: str) -> str:
    """A package as pip would install it: modules by name, and what it has for tilery. Gives the PYTHONPATH to it."""
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    info = folder / "planted-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1\n")
    (info / "entry_points.txt").write_text(entry_points)
    return os.pathsep.join([str(folder), *filter(None, sys.path)])
