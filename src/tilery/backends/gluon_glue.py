"""Gluon: Triton's compiler with the layouts, barriers and copies in the author's hands."""

from typing import Any

from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilery.backends.triton_glue import Descriptor, compile

__all__ = ["compile", "descriptor"]


def descriptor(x: Any, columns_first: bool, block: list[int], layout: Any) -> Any:
    """TMA's view of a matrix, of its transpose where columns are contiguous; of a tensor or, to compile, of a spec."""
    if not isinstance(x, Tensor):
        return Descriptor(x, tuple(block), layout)
    view = x.detach().t() if columns_first else x.detach()
    return TensorDescriptor(view, list(view.shape), [view.stride(0), 1], block, layout)
