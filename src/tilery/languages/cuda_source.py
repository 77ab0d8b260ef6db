"""What a CUDA C++ kernel is written with on the host: where its source is, and how wide its accesses may be."""

import functools
from pathlib import Path
from typing import NamedTuple

from tilery.base.spec import TensorSpec


class Source(NamedTuple):
    """A kernel in a .cu file."""

    path: Path
    name: str

    @property
    def text(self) -> str:
        return _text_of(self.path)


@functools.cache
def _text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def vector_width(tensors: tuple[TensorSpec, ...], *steps: int) -> int:
    """Values per access: 16 bytes of them where all tensors and steps, in values, keep to 16 bytes, else 1."""
    values = 16 // tensors[0].dtype.itemsize
    vectors = all(t.aligned for t in tensors) and all(step % values == 0 for step in steps)
    return values if vectors else 1
