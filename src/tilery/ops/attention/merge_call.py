"""Calls of merge_attention and its backward: parts of keys, and where the rows of a result and of an lse lie.

A row is one query of one head. Rows are counted as the result has them: by its outer, middle and inner dimension, B, S
and H by layout "bshd", B, H and S by "bhsd", T and H by "thd", which has no outer one.
"""

from typing import NamedTuple

from tilery.base.spec import TensorSpec
from tilery.core.call import Call

# Which dimensions of a result, behind that of the parts, and which of an lse are outer, middle and inner.
LAYOUTS = {
    "bshd": ((0, 1, 2), (0, 2, 1)),
    "bhsd": ((0, 1, 2), (0, 1, 2)),
    "thd": ((None, 0, 1), (None, 1, 0)),
}


class Steps(NamedTuple):
    """Elements from one part and row to the next."""

    part: int
    outer: int
    middle: int
    inner: int


class Sizes(NamedTuple):
    parts: int
    rows: int
    middle: int
    inner: int


class MergeCall(Call):
    outs: TensorSpec
    lses: TensorSpec
    layout: str

    @property
    def value_dim(self) -> int:
        return self.outs.shape[-1]

    @property
    def sizes(self) -> Sizes:
        parts, *rows, _ = self.outs.shape
        outer, middle, inner = [1, *rows] if len(rows) == 2 else rows
        return Sizes(parts, outer * middle * inner, middle, inner)

    def steps(self, x: TensorSpec) -> Steps:
        """Elements from row to row of outs, or of a tensor that has no parts: a result or its gradient."""
        return self._steps(x, LAYOUTS[self.layout][0], len(x.shape) > len(self.layout))

    def lse_steps(self, x: TensorSpec) -> Steps:
        return self._steps(x, LAYOUTS[self.layout][1], len(x.shape) == len(self.layout))

    def _steps(self, x: TensorSpec, dims: tuple[int | None, ...], parts: bool) -> Steps:
        rows = (0 if dim is None else x.stride(dim + parts) for dim in dims)
        return Steps(x.stride(0) if parts else 0, *rows)
