"""What kernels ask of a call of matmul, matmul_add, linear or linear_silu_mul: operands, sizes, strides, epilogue."""

from typing import Any, NamedTuple

from tilery.base.launch import Argument, Scalar
from tilery.core.call import Call
from tilery.ops.rows.shape import Rows, rows


class Strides(NamedTuple):
    """Elements from one row of a matrix to the next, and from one column to the next."""

    row: int
    column: int


class MatmulCall(Call):
    """A product with an epilogue: out [M, N] = act(alpha · a b + bias) + beta · addend; a [M, K], b [K, N].

    This class is matmul's own, which has no epilogue. The classes below say which arguments of other ops these are.
    """

    user_names = ("a", "b", "")  # what users call a, b and the addend
    act = "none"
    halves = 1  # 2: b is gate [K, N] and up [K, N] side by side, and out = act(a · gate) · (a · up)

    # Found among the call's own values:
    precision: str
    c: Any

    @property
    def a(self) -> Argument:
        return self._value("a")

    @property
    def b(self) -> Argument:
        return self._value("b")

    @property
    def out(self) -> Argument:
        return self._value("c")

    @property
    def bias(self) -> Argument | None:
        """[N]"""
        return None

    @property
    def addend(self) -> Argument | None:
        """[M, N]"""
        return None

    @property
    def alpha(self) -> Scalar | None:
        """None where it is 1."""
        return None

    @property
    def beta(self) -> Scalar | None:
        """None where it is 1."""
        return None

    @property
    def m(self) -> int:
        return self.a.shape[0]

    @property
    def n(self) -> int:
        """Columns of the output."""
        return self.b.shape[1]

    @property
    def k(self) -> int:
        return self.a.shape[1]

    @property
    def a_strides(self) -> Strides:
        return Strides(*self.a.strides)

    @property
    def b_strides(self) -> Strides:
        return Strides(*self.b.strides)

    @property
    def addend_strides(self) -> Strides:
        return Strides(0, 0)

    def _value(self, name: str) -> Any:
        return self._values[name]


class MatmulAddCall(MatmulCall):
    """matmul_add: c is the addend, and the output is y."""

    user_names = ("a", "b", "c")

    @property
    def out(self) -> Argument:
        return self._value("y")

    @property
    def addend(self) -> Argument:
        return self._value("c")

    @property
    def addend_strides(self) -> Strides:
        return Strides(*self.addend.strides)

    @property
    def alpha(self) -> Scalar:
        return self._value("alpha")

    @property
    def beta(self) -> Scalar:
        return self._value("beta")


class LinearCall(MatmulCall):
    """linear: a is x [..., K] read as rows, b the transpose of weight [N, K], and the addend is the residual."""

    user_names = ("x", "weight", "residual")

    @property
    def a(self) -> Argument:
        return self._value("x")

    @property
    def b(self) -> Argument:
        return self._value("weight")

    @property
    def out(self) -> Argument:
        return self._value("y")

    @property
    def bias(self) -> Argument | None:
        return self._value("bias")

    @property
    def addend(self) -> Argument | None:
        return self._value("residual")

    @property
    def act(self) -> str:  # type: ignore[override]
        return self._value("activation")

    @property
    def m(self) -> int:
        return self.x_rows.m

    @property
    def n(self) -> int:
        return self.b.shape[0] // self.halves

    @property
    def k(self) -> int:
        return self.x_rows.n

    @property
    def x_rows(self) -> Rows:
        return rows(self.a)

    @property
    def a_strides(self) -> Strides:
        return Strides(self.x_rows.stride, 1)

    @property
    def b_strides(self) -> Strides:
        return Strides(self.b.stride(1), self.b.stride(0))

    @property
    def addend_strides(self) -> Strides:
        return Strides(0 if self.addend is None else rows(self.addend).stride, 1)


class LinearSiluMulCall(LinearCall):
    """linear_silu_mul: weight [2N, K] is gate and then up; there is nothing to add."""

    user_names = ("x", "weight", "")
    act = "silu"
    halves = 2
    bias = None
    addend = None

    @property
    def addend_strides(self) -> Strides:
        return Strides(0, 0)
