"""What kernels ask of a call of a gated activation."""

from functools import cached_property
from typing import Any

from tilery.base.rows import Rows, flat_rows
from tilery.base.rows import rows as rows_of
from tilery.core.call import Call


class GatedCall(Call):
    """A call of a gated activation or of its backward; gate and up are two arguments, or `gate` or `x` holds both."""

    @property
    def act(self) -> str:
        found: str = self._values.get("approximate", "silu")
        return found

    @cached_property
    def packed(self) -> Any:
        """The tensor [..., 2N] whose halves are gate and up; None where they are two."""
        if "x" in self._values:
            return self.x
        return self.gate if self.up is None else None

    @cached_property
    def halves(self) -> tuple[Any, Any]:
        """gate and up, views where they are packed."""
        x = self.packed
        if x is None:
            return self.gate, self.up
        half = x.shape[-1] // 2
        shape = (*x.shape[:-1], half)
        return x.view(shape, x.strides), x.view(shape, x.strides, start=half)

    @property
    def rows(self) -> Rows:
        """The rows of gate."""
        if self.packed is None:
            return rows_of(self.gate)
        m, n, stride = rows_of(self.packed)
        return Rows(m, n // 2, stride)

    @property
    def flat_rows(self) -> tuple[int, ...]:
        """Rows, elements in a row, and the strides of gate and up; one long row where those are two contiguous ones."""
        if self.packed is None:
            return flat_rows(self.gate, self.up)
        m, n, stride = self.rows
        return m, n, stride, stride

    @property
    def sources(self) -> tuple[Any, Any]:
        """The tensors that hold gate and up; rows of up begin `up_start` elements into those of its tensor."""
        return (self.gate, self.up) if self.packed is None else (self.packed, self.packed)

    @property
    def up_start(self) -> int:
        return 0 if self.packed is None else self.rows.n
