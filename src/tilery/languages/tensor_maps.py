"""Tensor maps: what TMA must know of a tensor to load boxes of it. Made by the driver, passed to a kernel by value."""

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

import torch
from cuda.bindings import driver

from tilery.base.launch import Argument, Values
from tilery.base.spec import TensorSpec

SWIZZLE_BYTES = 128  # bytes of a row of a box, which its swizzle in shared memory spans

_BYTES, _ALIGNED = 128, 128  # of a CUtensorMap; the driver asks for an address that is a multiple of 64
_KEPT = 4096  # maps: a model has a few for each of its layers
_MOST_ROWS = 256  # of a box, along each dimension
_KINDS = {
    1: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
    2: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT16,
    4: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT32,
}
# Values that may be filled with NaN: the driver must know what NaN is.
_FLOATS = {
    torch.float16: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
    torch.bfloat16: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
}
_PLAIN = driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE
_SWIZZLE = driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B
# With 256 bytes, boxes that lie side by side would each bring both: 2 to 7 % more from memory where they are not loaded
# together.
_PROMOTION = driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B
_WIDE_PROMOTION = driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B
_ZEROS = driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE
_NANS = driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA


class TensorMap:
    """Memory of its own: objects of cuda.bindings lie at multiples of 16, which the driver does not take."""

    def __init__(self) -> None:
        self._memory = ctypes.create_string_buffer(_BYTES + _ALIGNED)
        start = ctypes.addressof(self._memory)
        self.address = start + -start % _ALIGNED

    def getPtr(self) -> int:  # noqa: N802  so that cuda.bindings takes it as an argument of a kernel
        return self.address


def refusal(name: str, x: TensorSpec) -> str | None:
    """Why TMA cannot load from a matrix [rows, columns] of contiguous rows."""
    size, (rows, columns) = x.dtype.itemsize, x.shape
    if not x.aligned:
        return f"{name} must start at a multiple of 16 bytes for TMA to load from it"
    if rows <= 1 or not columns:  # there is no next row
        return None
    if x.stride(0) * size % 16:
        return f"rows of {name} must start at multiples of 16 bytes for TMA to load them, got stride {x.stride(0)}"
    if x.stride(0) < columns:
        return f"rows of {name} must not overlap for TMA to load them, got stride {x.stride(0)} for {columns} columns"
    return None


def heads_refusal(name: str, x: TensorSpec, sizes: tuple[int, ...], strides: tuple[int, ...]) -> str | None:
    """Why TMA cannot load boxes of a tensor with these sizes, innermost first, and strides of all but the innermost."""
    if not x.aligned:
        return f"{name} must start at a multiple of 16 bytes for TMA to load from it"
    for size, stride in zip(sizes[1:], strides):
        if size > 1 and stride * x.dtype.itemsize % 16:
            return f"tokens and heads of {name} must start at multiples of 16 bytes for TMA, got stride {stride}"
        if size > 1 and stride < sizes[0]:
            return f"tokens and heads of {name} must not overlap for TMA to load them, got stride {stride}"
    return None


@dataclass(frozen=True)
class TensorMapOf:
    """A tensor map over an argument of a launch, seen with these sizes and strides."""

    x: Argument
    sizes: tuple[int, ...]  # columns and rows first
    strides: tuple[int, ...]  # in values, of all dimensions but the columns
    box: tuple[int, ...]  # how much of each dimension but the columns, 1 of those that are not given
    nan: torch.dtype | None = None  # fill with NaN of this dtype, not zeros, what is outside
    side_by_side: bool = False  # boxes that lie side by side are loaded together
    emulated: bool = False  # as the emulator reads it, not TMA

    def bound(self, values: Values) -> TensorMap:
        return heads_at(
            self.x.address(values), self.x.dtype.itemsize, self.sizes, self.strides, *self.box, nan=self.nan,
            side_by_side=self.side_by_side, emulated=self.emulated,
        )  # fmt: skip


def of_matrix(x: Argument, box_rows: int) -> TensorMapOf:
    """A map of a matrix [rows, columns]: boxes of so many rows of SWIZZLE_BYTES bytes, swizzled, zeros outside."""
    rows, columns = x.shape
    return TensorMapOf(x, (columns, rows), (x.stride(0),), (box_rows,))


def heads_at(
    address: int, itemsize: int, sizes: tuple[int, ...], strides: tuple[int, ...], *box: int,
    nan: torch.dtype | None = None, side_by_side: bool = False, emulated: bool = False,
) -> TensorMap:  # fmt: skip
    """A map of values of `itemsize` bytes from `address` on. What is outside reads as zeros, or as NaN of dtype `nan`.

    `box`: how much of each dimension but the columns, 1 of those that are not given.
    """
    one = -(-sizes[0] * itemsize // 16) * 16 // itemsize  # along a single one any step of 16 bytes will do
    steps = tuple(stride if size > 1 else one for size, stride in zip(sizes[1:], strides))
    if emulated:
        return _for_emulator(address, sizes, steps, box, itemsize, nan)
    more = ([nan] if nan else []) if not side_by_side else [nan, True]
    return _made(address, sizes, steps, box, itemsize, *more)


@functools.lru_cache(maxsize=_KEPT)
def _made(
    address: int, sizes: tuple[int, ...], steps: tuple[int, ...], boxed: tuple[int, ...], itemsize: int,
    nan: torch.dtype | None = None, side_by_side: bool = False,
) -> TensorMap:  # fmt: skip
    assert all(0 < size <= _MOST_ROWS for size in boxed) and all(sizes) and address % 16 == 0
    assert all(step * itemsize % 16 == 0 for step in steps)
    made, rank = TensorMap(), len(sizes)
    lengths, strides = (ctypes.c_uint64 * rank)(*sizes), (ctypes.c_uint64 * (rank - 1))(*(n * itemsize for n in steps))
    box = (ctypes.c_uint32 * rank)(SWIZZLE_BYTES // itemsize, *boxed, *[1] * (rank - 1 - len(boxed)))
    apart = (ctypes.c_uint32 * rank)(*[1] * rank)
    kind, outside = (_KINDS[itemsize], _ZEROS) if nan is None else (_FLOATS[nan], _NANS)
    how = int(_PLAIN), int(_SWIZZLE), int(_WIDE_PROMOTION if side_by_side else _PROMOTION), int(outside)
    status = _encode()(made.address, int(kind), rank, address, lengths, strides, box, apart, *how)
    if status:
        what = f"{list(sizes[::-1])} of {itemsize} bytes with strides {list(steps[::-1])} at {address:#x}"
        what += f", boxes of {' × '.join(map(str, boxed))} rows"
        raise RuntimeError(f"CUDA: making a tensor map of {what}: {driver.CUresult(status).name}")
    return made


class _EmulatedMap(ctypes.Structure):
    """What cuda_emulator/runtime/copies.cpp reads in place of the driver's map."""

    _fields_ = [
        ("magic", ctypes.c_uint64), ("address", ctypes.c_uint64), ("rank", ctypes.c_uint32),
        ("itemsize", ctypes.c_uint32), ("fill", ctypes.c_uint32), ("box", ctypes.c_uint32 * 4),
        ("sizes", ctypes.c_uint32 * 5), ("strides", ctypes.c_uint64 * 4),
    ]  # fmt: skip


def _for_emulator(
    address: int, sizes: tuple[int, ...], steps: tuple[int, ...], boxed: tuple[int, ...], itemsize: int,
    nan: torch.dtype | None,
) -> TensorMap:  # fmt: skip
    made = TensorMap()
    map = _EmulatedMap.from_address(made.address)
    map.magic, map.address, map.rank, map.itemsize = 0x74696C65727900, address, len(sizes), itemsize
    map.fill = 0 if nan is None else 0x7FFF  # NaN in fp16 and in bf16
    map.box[: len(sizes) - 1] = [*boxed, *[1] * (len(sizes) - 1 - len(boxed))]
    map.sizes[: len(sizes)] = sizes
    map.strides[: len(steps)] = [step * itemsize for step in steps]
    return made


@functools.cache
def _encode() -> Any:
    """cuTensorMapEncodeTiled, called where the map is to lie."""
    function = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    numbers, pointer = ctypes.c_uint32, ctypes.c_void_p
    function.argtypes = [pointer, ctypes.c_int, numbers, pointer, *[pointer] * 4, *[ctypes.c_int] * 4]
    function.restype = ctypes.c_int
    return function
