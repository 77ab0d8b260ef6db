"""Gluon: Triton's compiler with the layouts, barriers and copies in the author's hands. Launches are Triton's."""

from typing import Any

from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilery.languages.triton_glue import Descriptor, LegacyDescriptor, bind, compile, legacy_compile

__all__ = ["Descriptor", "bind", "compile", "descriptor", "legacy_compile"]


def descriptor(x: Any, columns_first: bool, block: list[int], layout: Any) -> Any:
    """TEMPORARY: of the old idiom."""
    if not isinstance(x, Tensor):
        return LegacyDescriptor(x, tuple(block), layout)
    view = x.detach().t() if columns_first else x.detach()
    return TensorDescriptor(view, list(view.shape), [view.stride(0), 1], block, layout)
