"""Tensors [..., N] read as rows."""

from typing import NamedTuple

from tilery.base.spec import TensorSpec


class Rows(NamedTuple):
    """Rows that lie evenly: row r begins at r · stride."""

    m: int  # rows
    n: int  # elements in a row
    stride: int  # elements from one row to the next


class TwoLevelRows(NamedTuple):
    """Rows at two distances, as heads of packed qkv lie: row r begins at r // heads · stride + r % heads · step."""

    m: int
    n: int
    stride: int  # elements from one group of rows to the next
    heads: int  # rows in a group, 1 where all rows are evenly spaced
    step: int  # elements from one row to the next inside a group


def rows(x: TensorSpec) -> Rows:
    """[..., N] as M rows; x passed ops/rows/contract.py's check_rows."""
    m, shape = 1, x.shape
    for size in shape[:-1]:
        m *= size
    # A dimension of size 1 may have any stride: the innermost that is longer tells the distance of rows.
    stride = next((x.stride(d) for d in range(len(shape) - 2, -1, -1) if shape[d] > 1), None)
    if stride is None:
        stride = x.stride(0) if len(shape) == 2 else shape[-1]
    return Rows(m, shape[-1], stride)


def flat_rows(*tensors: TensorSpec) -> tuple[int, ...]:
    """Rows, elements in a row, and each tensor's stride; one long row where all tensors are contiguous."""
    found = [rows(t) for t in tensors]
    m, n, _ = found[0]
    if m <= 1 or all(r.stride == n for r in found):
        return 1, m * n, *(0 for _ in found)
    return m, n, *(r.stride for r in found)


def two_level_rows(x: TensorSpec) -> TwoLevelRows:
    """[..., N] as M rows at up to two distances; x passed ops/rows/contract.py's check_rows with levels=2."""
    m, n, stride = rows(x)
    found = levels(x)
    if len(found) < 2:
        return TwoLevelRows(m, n, stride, 1, 0)
    (count, step), (_, stride) = found
    return TwoLevelRows(m, n, stride, count, step)


def two_level_refusal(x: TensorSpec) -> str | None:
    """Why a kernel that takes evenly spaced rows only cannot take these."""
    if len(levels(x)) < 2:
        return None
    return f"rows of shape {list(x.shape)} with strides {list(x.strides)} lie at two distances; this kernel takes one"


def levels(x: TensorSpec) -> list[tuple[int, int]]:
    """(rows, distance) from the inside out: dimensions that lie evenly together are one level."""
    found: list[tuple[int, int]] = []
    if 0 in x.shape:  # no rows, or rows of nothing, lie anywhere
        return found
    for d in range(len(x.shape) - 2, -1, -1):
        size, stride = x.shape[d], x.stride(d)
        if size == 1:  # may have any stride
            continue
        if found and found[-1][0] * found[-1][1] == stride:
            found[-1] = (found[-1][0] * size, found[-1][1])
        else:
            found.append((size, stride))
    return found


def matrix(x: TensorSpec) -> TensorSpec:
    """[..., N] as [M, N], a view."""
    if len(x.shape) == 2:
        return x
    m, n, stride = rows(x)
    return x._replace(shape=(m, n), strides=(stride, 1))
