"""What kernels ask of a call of a product: operands, sizes, strides, epilogue."""

from typing import Any, NamedTuple

from tilery.base.launch import Argument, Scalar
from tilery.base.rows import Rows, rows
from tilery.base.spec import TensorSpec, Work
from tilery.core.call import Call


class Strides(NamedTuple):
    """Elements from one row of a matrix to the next, and from one column to the next."""

    row: int
    column: int


def layout(x: TensorSpec) -> str:
    """'n' where rows are contiguous, 't' where columns are."""
    return "n" if x.stride(-1) == 1 or (x.shape[-1] == 1 and x.stride(-2) != 1) else "t"


def warps_of_k(k: int) -> int | None:
    """Warps that share K without tensor cores: eight or four, whose loads of 16 bytes a thread are nearly all full.

    None where in both ways more than a sixth of the loads would be empty. On an H200 K = 1152 and 2304 took 1.2 and
    1.3 times as long so as by `cuda.hopper`.
    """
    vectors = k // 8
    for warps in (8, 4):
        if vectors >= 0.83 * 32 * warps * -(-vectors // (32 * warps)) > 0:
            return warps
    return None


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
    def batch(self) -> int:
        """Products of this size."""
        return 1

    @property
    def batch_strides(self) -> tuple[int, int]:
        """Elements from one product's a to the next one's, and so for b; 0 where all have the same."""
        return 0, 0

    @property
    def a_strides(self) -> Strides:
        return Strides(*self.a.strides[-2:])

    @property
    def b_strides(self) -> Strides:
        return Strides(*self.b.strides[-2:])

    @property
    def addend_strides(self) -> Strides:
        return Strides(0, 0)

    def _value(self, name: str) -> Any:
        return self._values[name]


def epilogue_fields(call: MatmulCall) -> dict[str, Any]:
    """What is added to sums of products and how, by the names of the fields of GemmParams and GemvParams."""
    bias, addend = (0 if x is None else x for x in (call.bias, call.addend))
    alpha, beta = (1.0 if x is None else x for x in (call.alpha, call.beta))
    row, column = call.addend_strides
    return {
        "bias": bias, "addend": addend, "addend_row_stride": row, "addend_col_stride": column, "alpha": alpha,
        "beta": beta,
    }  # fmt: skip


class BmmCall(MatmulCall):
    """bmm: a [B, M, K], b [B, K, N]."""

    precision = "ieee"

    @property
    def m(self) -> int:
        return self.a.shape[1]

    @property
    def n(self) -> int:
        return self.b.shape[2]

    @property
    def k(self) -> int:
        return self.a.shape[2]

    @property
    def batch(self) -> int:
        return self.a.shape[0]

    @property
    def batch_strides(self) -> tuple[int, int]:
        return self.a.stride(0), self.b.stride(0)


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


# Products of several matrices


def groups_hit(rows: int, groups: int) -> int:
    """Expected number of groups with a row, where each row takes any of them: sizes are known to the device alone."""
    return round(groups * (1 - (1 - 1 / groups) ** rows)) if groups else 0


class GroupedCall(Call):
    """A call of grouped_matmul: a [rows, K], b [groups, K, N]."""

    @property
    def rows(self) -> int:
        """Rows of all groups, and of none."""
        return self.a.shape[0]

    @property
    def groups(self) -> int:
        return self.b.shape[0]

    @property
    def n(self) -> int:
        return self.b.shape[2]

    @property
    def k(self) -> int:
        return self.a.shape[1]

    @property
    def groups_hit(self) -> int:
        """Expected number of groups with a row."""
        return groups_hit(self.rows, self.groups)

    @property
    def rows_per_group(self) -> int:
        """Approximate number of rows in a group that has any."""
        return -(-self.rows // max(self.groups_hit, 1))

    def tiles_expected(self, height: int) -> int:
        """Tiles of `height` rows that all groups have together: the last one of a group is half full, about."""
        return max(self.groups_hit, self.rows // height + self.groups_hit // 2)

    def most_tiles(self, height: int) -> int:
        """The most there may be: every group has at most one tile that is not full, and so have the rows of none."""
        return (self.rows + min(self.groups + 1, self.rows) * (height - 1)) // height


# Parts of a product


def part_rows(parts: TensorSpec) -> Rows:
    """Rows of one part; one long row where they lie end to end."""
    _, m, n = parts.shape
    row = parts.stride(1)
    return Rows(1, m * n, 0) if m <= 1 or row == n else Rows(m, n, row)


# Work of one block of a tiled product, for the tuner's cost model


def gemm_work(m: int, n: int, k: int, itemsize: int, tile_m: int, tile_n: int, blocks_per_tile: int = 1) -> Work:
    """c [M, N] = a [M, K] · b [K, N]. A tile over the edge multiplies zeros, and reads none of them."""
    tiles = -(-m // tile_m) * -(-n // tile_n)
    height, width = min(tile_m, m), min(tile_n, n)
    nbytes = ((height + width) * k + height * width) * itemsize
    return Work(tiles * blocks_per_tile, 2 * tile_m * tile_n * k // blocks_per_tile, nbytes // blocks_per_tile)


def batched_work(tiles: int, rows: int, n: int, k: int, itemsize: int, tile_m: int, tile_n: int) -> Work:
    """`tiles` tiles of matrices of about `rows` rows. What lies over an edge is multiplied, but not read."""
    height, width = min(tile_m, rows), min(tile_n, n)
    return Work(tiles, 2 * tile_m * tile_n * k, ((height + width) * k + height * width) * itemsize)
