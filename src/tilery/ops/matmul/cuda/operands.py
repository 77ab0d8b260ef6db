"""Operands of a product on Hopper: which dimension is contiguous, how TMA sees them, and copies where it cannot."""

from dataclasses import dataclass, replace
from pathlib import Path

from tilery.base.launch import Argument, Launch
from tilery.base.spec import TensorSpec
from tilery.languages.cuda_source import Source
from tilery.languages.tensor_maps import TensorMapOf
from tilery.ops.matmul.call import MatmulCall

_COPY_ROWS = Source(Path(__file__).with_name("copy_rows.cu"), "copy_rows")
_THREADS = 256
_ALIGNED = 8  # values of 16 bits in 16 bytes, which TMA's addresses and strides are multiples of
_CHUNK = 64  # rows of an MN-major operand, or values of K, in a box of a tensor map
_FEW_ROWS = 64  # up to which a copy is K-major: MN-major tiles have 64 rows at least


@dataclass(frozen=True)
class Operand:
    """a [batch, M, K] or b [batch, N, K] of a product, with its strides in that order, in values of 16 bits."""

    name: str
    x: TensorSpec
    batches: int  # 1 where all products have the same
    rows: int  # M, or all columns of b
    k: int
    batch_stride: int
    row_stride: int
    k_stride: int
    mn_major: bool = False
    copied_from: "Operand | None" = None  # the user's, which TMA cannot address; then x is workspace

    @property
    def lines(self) -> tuple[int, int, int]:
        """The matrix as it lies in memory: how many lines, of how many values, how far apart."""
        return (self.k, self.rows, self.k_stride) if self.mn_major else (self.rows, self.k, self.row_stride)

    @property
    def workspace_name(self) -> str:
        return f"{self.name}_copy"

    def tensor_map(self, tile_rows: int, multicast: int) -> TensorMapOf:
        """Boxes of a part of a tile of so many rows; `multicast` blocks of a cluster load one each."""
        assert isinstance(self.x, Argument)
        count, width, stride = self.lines
        box = (_CHUNK if self.mn_major else tile_rows) // multicast
        sizes, strides = (width, count, self.batches), (stride, self.batch_stride)
        return TensorMapOf(self.x, sizes, strides, (box,), side_by_side=self.mn_major and tile_rows > _CHUNK)


def operands(call: MatmulCall) -> tuple[Operand, Operand]:
    """a and b as the kernel is given them."""
    (a_row, a_k), (b_k, b_row) = call.a_strides, call.b_strides
    a_batch, b_batch = call.batch_strides
    first, second = call.user_names[:2]
    a = _operand(call, first, call.a, call.m, a_batch, a_row, a_k)
    return a, _operand(call, second, call.b, call.halves * call.n, b_batch, b_row, b_k)


def _operand(
    call: MatmulCall, name: str, x: TensorSpec, rows: int, batch_stride: int, row_stride: int, k_stride: int
) -> Operand:
    given = Operand(name, x, call.batch if batch_stride else 1, rows, call.k, batch_stride, row_stride, k_stride)
    return addressed(given) or _copy(call, given)


def addressed(given: Operand) -> Operand | None:
    """The operand as TMA can address it, with its rows along K or MN-major; None where it cannot."""
    aligned = given.x.aligned and (given.batches == 1 or given.batch_stride % _ALIGNED == 0)
    if aligned and _are_lines(given.k_stride, given.k, given.row_stride, given.rows):
        return given
    if aligned and _are_lines(given.row_stride, given.rows, given.k_stride, given.k):
        return replace(given, mn_major=True)
    return None


def _are_lines(inner: int, width: int, outer: int, count: int) -> bool:
    """Whether `count` lines of `width` values are contiguous, begin at multiples of 16 bytes, and do not overlap."""
    return (inner == 1 or width <= 1) and (count <= 1 or (outer % _ALIGNED == 0 and outer >= width))


def _copy(call: MatmulCall, given: Operand) -> Operand:
    """A copy whose lines TMA can address; until there is workspace, of its spec."""
    k_major = given.k_stride == 1 or given.row_stride != 1 or given.rows <= _FEW_ROWS
    count, width = (given.rows, given.k) if k_major else (given.k, given.rows)
    stride = -(-width // _ALIGNED) * _ALIGNED
    spec = TensorSpec.contiguous((given.batches, count, stride), given.x.dtype, given.x.device)
    row, k = (stride, 1) if k_major else (1, stride)
    x = getattr(call, given.workspace_name, spec)
    return Operand(
        given.name, x, given.batches, given.rows, given.k, count * stride, row, k, not k_major, copied_from=given
    )


def copy_launch(x: Operand) -> Launch:
    """The launch that fills the workspace of an operand."""
    given = x.copied_from
    assert given is not None
    count, width, stride = x.lines
    line, value = (given.k_stride, given.row_stride) if x.mn_major else (given.row_stride, given.k_stride)
    args = {
        "from": given.x, "to": x.x, "lines": count, "width": width, "to_stride": stride,
        "batch_stride": given.batch_stride, "line_stride": line, "value_stride": value,
    }  # fmt: skip
    return Launch(_COPY_ROWS, x.batches * count, args, {"THREADS": _THREADS}, {"threads": _THREADS}, pdl=True)
