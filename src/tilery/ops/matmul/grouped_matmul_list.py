"""grouped_matmul for lists of tensors."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tilery.base.errors import require
from tilery.base.spec import dtype_name
from tilery.ops.matmul.grouped_matmul import grouped_matmul


def grouped_matmul_list(
    a: Sequence[Tensor], b: Sequence[Tensor], *, backend: str | None = None, config: Any = None
) -> list[Tensor]:
    """c[g] = a[g] · b[g] by one grouped_matmul; a[g] [M_g, K], b[g] [K, N].

    Rows that lie end to end, as split gives them, and matrices at one distance, as unbind does, are taken as they lie;
    others are copied first, and so are all where a gradient is wanted.
    """
    given = f"got a of {_described(a)} and b of {_described(b)}"
    matrices = all(isinstance(t, Tensor) and t.dim() == 2 for t in (*a, *b))
    require(matrices and len(a) == len(b), f"grouped_matmul_list: a and b must be as many matrices, {given}")
    if not a:
        return []
    (k, n), kind, rows = b[0].shape, b[0].dtype, [t.shape[0] for t in a]
    alike = all(t.shape == (k, n) for t in b) and all(t.shape[1] == k for t in a)
    require(
        alike and all(t.dtype == kind for t in (*a, *b)),
        f"grouped_matmul_list: all a [M, K] and b [K, N] must have one K, N and dtype, {given}; call matmul for each",
    )
    ends = list(accumulate(rows))
    graded = torch.is_grad_enabled() and any(t.requires_grad for t in (*a, *b))
    if graded or torch.compiler.is_compiling():
        # One view over all parts has no gradients for the parts, and a tracer has no memory to look at.
        joined, stacked = torch.cat(list(a)), torch.stack(list(b))
    else:
        joined, stacked = _joined(a, [0, *ends]), _stacked(b)
    offsets = _offsets(ends, a[0].device)
    return list(grouped_matmul(joined, stacked, offsets, backend=backend, config=config).split(rows))


def _offsets(ends: list[int], device: torch.device) -> Tensor:
    offsets = torch.tensor(ends, dtype=torch.int32)
    if device.type != "cuda" or torch.compiler.is_compiling():
        return offsets.to(device)
    if torch.cuda.is_current_stream_capturing():  # a graph would read the host's memory again
        return torch.cat([torch.full((1,), end, dtype=torch.int32, device=device) for end in ends])
    return offsets.pin_memory().to(device, non_blocking=True)  # from pinned memory nobody waits for the copy


def _joined(a: Sequence[Tensor], starts: list[int]) -> Tensor:
    row, column = a[0].stride()
    if _lies_at(a, [start * row for start in starts]):
        return a[0].as_strided((starts[-1], a[0].shape[1]), (row, column))
    return torch.cat(list(a))


def _stacked(b: Sequence[Tensor]) -> Tensor:
    step = int(b[1].storage_offset() - b[0].storage_offset()) if len(b) > 1 else b[0].numel()
    if step > 0 and _lies_at(b, [i * step for i in range(len(b))]):
        return b[0].as_strided((len(b), *b[0].shape), (step, *b[0].stride()))
    return torch.stack(list(b))


def _lies_at(tensors: Sequence[Tensor], distances: list[int]) -> bool:
    """Whether each lies so many elements behind the first, with its strides."""
    first = tensors[0]
    storage, start, strides = first.untyped_storage().data_ptr(), first.storage_offset(), first.stride()
    return all(
        t.untyped_storage().data_ptr() == storage and t.stride() == strides and t.storage_offset() == start + distance
        for t, distance in zip(tensors, distances)
    )


def _described(tensors: Sequence[Any]) -> str:
    kinds = [f"{dtype_name(t.dtype)}{list(t.shape)}" if isinstance(t, Tensor) else type(t).__name__ for t in tensors]
    return ", ".join(kinds) or "nothing"
