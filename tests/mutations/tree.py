"""Copies of the source to plant bugs in, each with the state and the compiled kernels of its children."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from mutations.mutation import Mutation, Place, find, mutated

_STEP = 10 * 10**9  # ns between the times of mutated files: Python and Numba know a file by its time and size


class Tree:
    """`folder`/src holds a copy of the package. Its path never changes: kernels are kept by path and time of a file."""

    def __init__(self, folder: Path, package: Path) -> None:
        self.folder, self.source = folder, folder / "src"
        self.package = self.source / package.name
        shutil.copytree(package, self.package, ignore=shutil.ignore_patterns("__pycache__"))
        self.kernels, self.emulated, self.data = (folder / name for name in ("numba", "cuda_emulator", "data"))
        for made in (self.kernels, self.emulated, self.data):
            made.mkdir()
        self._planted = 0

    @contextlib.contextmanager
    def planted(self, mutation: Mutation) -> Iterator[str]:
        """Inside the block the bug is there; gives the name of the mutated module."""
        place = find(mutation, self.package)
        text, original, before = mutated(mutation, place), place.path.read_text(), place.path.stat()
        self._planted += 1
        try:
            _write(place.path, text, before.st_mtime_ns + _STEP * self._planted)
            yield self._module(place)
        finally:
            _write(place.path, original, before.st_mtime_ns)

    def _module(self, place: Place) -> str:
        if place.path.suffix != ".py":  # any kernel may include it
            return self.package.name
        parts = place.path.relative_to(self.source).with_suffix("").parts
        return ".".join(part for part in parts if part != "__init__")

    @contextlib.contextmanager
    def state(self) -> Iterator[Path]:
        """A folder for one child, with what was measured of this machine; kernels are shared by all children."""
        made = self.folder / "state"
        (made / "cache").mkdir(parents=True)
        for kept in (self.kernels, self.emulated):
            (made / "cache" / kept.name).symlink_to(kept)
        shutil.copytree(self.data, made / "data")
        try:
            yield made
        finally:
            ceilings = made / "data" / "ceilings"
            if ceilings.exists() and not (self.data / "ceilings").exists():
                shutil.copytree(ceilings, self.data / "ceilings")
            shutil.rmtree(made)

    def take_kernels(self, other: "Tree") -> None:
        """Copies what another tree has compiled of the same files. Numba's folders are named after the path."""
        from numba.core.caching import _CacheLocator

        name = _CacheLocator.get_suitable_cache_subpath
        for folder in {path.parent.relative_to(self.source) for path in self.package.rglob("*.py")}:
            mine, theirs = (name(str(tree.source / folder / "x.py")) for tree in (self, other))
            for kept in other.kernels.iterdir():
                if (kept / theirs).is_dir():
                    shutil.copytree(kept / theirs, self.kernels / kept.name / mine, dirs_exist_ok=True)


def _write(path: Path, text: str, time: int) -> None:
    path.write_text(text)
    os.utime(path, ns=(time, time))
