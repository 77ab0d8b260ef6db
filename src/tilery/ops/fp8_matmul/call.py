"""What kernels ask of a call of fp8_matmul or fp8_matmul_rowwise."""

from typing import NamedTuple

from tilery.base.spec import TensorSpec
from tilery.core.call import Call
from tilery.ops.quantize.formats import GROUP


class ScaleStrides(NamedTuple):
    """Where the scale of a row and a group of K lies: at row // rows_per_scale · row + group · column."""

    rows_per_scale: int
    row: int
    column: int


class Fp8MatmulCall(Call):
    """A call of either op: sizes, and where scales lie."""

    @property
    def m(self) -> int:
        return self.a.shape[0]

    @property
    def n(self) -> int:
        return self.b.shape[0]

    @property
    def k(self) -> int:
        return self.a.shape[1]

    @property
    def a_scale_strides(self) -> ScaleStrides:
        return _scale_strides(self.a_scale, self.m)

    @property
    def b_scale_strides(self) -> ScaleStrides:
        return _scale_strides(self.b_scale, self.n)


def _scale_strides(scale: TensorSpec, rows: int) -> ScaleStrides:
    """Strides of the scales of a matrix of so many rows; 0 where one scale is for all."""
    if len(scale.shape) == 1:
        return ScaleStrides(1, 0, 0)
    return ScaleStrides(
        1 if scale.shape[0] == rows else GROUP, scale.stride(0), scale.stride(1) if scale.shape[1] > 1 else 0
    )
