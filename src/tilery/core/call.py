"""The arguments of one call of an op, by name."""

from collections.abc import Mapping
from typing import Any, Self

from torch import Tensor

from tilery.base.spec import TensorSpec


class Call:
    """Arguments, outputs and workspace of one call, as attributes.

    Where a plan is made, a tensor is a spec (`base.launch.Argument`) and a runtime scalar a reference
    (`base.launch.Scalar`). Where something runs, in a backward or a check of indices, they are the tensors and numbers
    themselves. A family of ops derives a class of its own for what its kernels ask of these: sizes, strides.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("_values", {})
        if name in values:
            return values[name]
        raise AttributeError(f"a call of this op has {', '.join(values)}, not {name!r}")

    def __contains__(self, name: str) -> bool:
        """Whether the call has an argument, output or workspace of this name."""
        return name in self._values

    def tensors(self) -> list[Any]:
        """The call's tensors: arguments in order, then outputs and workspace."""
        return [value for value in self._values.values() if isinstance(value, TensorSpec | Tensor)]

    def extended(self, more: Mapping[str, Any]) -> Self:
        """The same call with more names."""
        both = set(self._values) & set(more)
        assert not both, f"an output or workspace must not be called like an argument: {', '.join(both)}; rename it"
        return type(self)({**self._values, **more})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{n}={v}' for n, v in self._values.items())})"
