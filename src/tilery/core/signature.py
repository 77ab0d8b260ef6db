"""The parameters of an op, from its reference's annotations: completing, checking and keying a call's arguments."""

import inspect
from collections.abc import Callable
from types import NoneType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards
from torch.autograd import forward_ad
from torch.nn import Parameter

from tilery.base.errors import BadInput
from tilery.base.launch import Argument, Scalar
from tilery.base.spec import TensorSpec, require_dense

_modes = torch._C._len_torch_dispatch_stack


class Kind(NamedTuple):
    """What one parameter takes."""

    types: tuple[type, ...]
    tensor: bool
    decides: bool  # part of the plan's key; a runtime scalar is not

    def __str__(self) -> str:
        return " or ".join("None" if t is NoneType else t.__name__ for t in self.types)


class Signature:
    """An op's parameters, in order."""

    def __init__(self, op: str, reference: Callable[..., Any], runtime: tuple[str, ...]) -> None:
        self.op, self.python, self.runtime = op, inspect.signature(reference), runtime
        hints = get_type_hints(reference)
        self.names = tuple(self.python.parameters)
        self._defaults = {n: p.default for n, p in self.python.parameters.items()}
        accepted = [_accepted(hints[n]) for n in self.names]
        self.kinds = tuple(Kind(a, Tensor in a, n not in runtime) for a, n in zip(accepted, self.names))
        self._tensors = sum(kind.tensor for kind in self.kinds)
        assert all(kind.tensor for kind in self.kinds[: self._tensors]), f"{op}: tensors come before scalars"
        self.decisive = tuple(n for n, kind in zip(self.names, self.kinds) if kind.decides)

    # Arguments

    def complete(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Every argument in order, defaults filled in."""
        rest = [kwargs.get(n, self._defaults[n]) for n in self.names[len(args) :]]
        if len(args) + len(rest) == len(self.names) and not any(v is inspect.Parameter.empty for v in rest):
            given = sum(n in kwargs for n in self.names[len(args) :])
            if given == len(kwargs):
                return (*args, *rest)
        try:
            self.python.bind(*args, **kwargs)
        except TypeError as error:
            raise BadInput(f"{self.op}: {error}; it takes {self.python}") from None
        raise AssertionError("a call that binds was not completed")

    def bind(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments, each of the kind the signature says and, if a tensor, one that holds dense data."""
        for name, kind, value in zip(self.names, self.kinds, args, strict=True):
            if not isinstance(value, kind.types):
                raise BadInput(f"{self.op}: {name} must be {kind}, got {type(value).__name__}")
            if isinstance(value, Tensor):
                require_dense(f"{self.op}: {name}", value)
            if isinstance(value, int) and not _fits(value):
                raise BadInput(f"{self.op}: {name} must be an integer of 64 bits, got {value}")
        return tuple(_plain_scalar(a, k) for a, k in zip(args, self.kinds))

    def specs(self, args: tuple[Any, ...], aligned: bool | None = None) -> tuple[Any, ...]:
        """What decides the plan: specs of tensors, and scalars but the runtime ones."""
        return tuple(
            TensorSpec.of(a, aligned) if isinstance(a, Tensor) else a for a, k in zip(args, self.kinds) if k.decides
        )

    def references(self, specs: tuple[Any, ...]) -> dict[str, Any]:
        """Each parameter by name, as a launch refers to it: `specs` are what the signature's own `specs` gives."""
        given = iter(specs)
        found: dict[str, Any] = {}
        for slot, (name, kind) in enumerate(zip(self.names, self.kinds)):
            if not kind.decides:
                found[name] = Scalar(slot, kind.types[0])
                continue
            value = next(given)
            found[name] = Argument.at_slot(value, slot) if isinstance(value, TensorSpec) else value
        return found

    # Which plan a call has

    def key(self, args: tuple[Any, ...], backend: str | None, config: Any) -> tuple[Any, ...] | None:
        """What decides the plan; None unless every tensor is plain and no gradient has a say."""
        key: list[Any] = [backend, config]
        grad = torch.is_grad_enabled()
        try:
            for value, kind in zip(args, self.kinds):
                if kind.tensor and type(value) in (Tensor, Parameter):
                    if (grad and value.requires_grad) or value.is_neg():
                        return None
                    key += (value.shape, value.stride(), value.dtype, value.device, value.data_ptr() % 16 == 0)
                elif type(value) in kind.types:
                    if type(value) is int and not _fits(value):
                        return None
                    key += [value] if kind.decides else []
                else:
                    return None
        except RuntimeError:  # sparse and nested tensors have no strides
            return None
        return tuple(key)

    def guard(self, args: tuple[Any, ...]) -> Callable[[tuple[Any, ...]], bool] | None:
        """Whether other arguments have this call's key, asked in 0.8 µs for two tensors, where a key takes 2.2 µs.

        Made only for calls with all tensors aligned, as nearly all are; None for the others. torch's guards compare the
        thread's dispatch keys too, which transforms and torch.jit.trace change; for modes it is asked here.
        """
        count = self._tensors
        present = tuple(i for i in range(count) if args[i] is not None)
        absent = tuple(i for i in range(count) if args[i] is None)
        first, leading = len(present), present == tuple(range(len(present)))
        tensors = tuple(args[i] for i in present)
        if any(t.data_ptr() % 16 for t in tensors):
            return None
        sizes, strides = ([list(f(t)) for t in tensors] for f in (Tensor.size, Tensor.stride))
        same = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check  # type: ignore
        gradients = any(t.requires_grad for t in tensors)  # they have no say only while torch computes none
        scalars = [(i, kind.types, kind.decides, args[i]) for i, kind in enumerate(self.kinds) if i >= count]

        def takes(given: tuple[Any, ...]) -> bool:
            for i in absent:
                if given[i] is not None:
                    return False
            tensors = given[:first] if leading else tuple([given[i] for i in present])
            try:
                for t in tensors:
                    if (type(t) is not Tensor and type(t) is not Parameter) or t.is_nested or t.data_ptr() & 15:
                        return False  # of a nested one the guards would read sizes, which it has not
            except RuntimeError:  # no storage: torch.func's
                return False
            if _modes() or not same(*tensors) or forward_ad._current_level >= 0:
                return False
            if gradients and torch.is_grad_enabled():
                return False
            for i, types, decides, value in scalars:
                now = given[i]
                kind = type(now)
                if kind not in types or (now != value if decides else kind is int and not _fits(now)):
                    return False
            return True

        return takes


def torch_interferes() -> bool:
    """Whether a mode, a transform, torch.jit.trace or forward-mode AD must see the call."""
    return bool(
        _modes()
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    )


def _fits(value: int) -> bool:
    """Whether an integer has 64 bits at most."""
    return -(2**63) <= value < 2**63


def _accepted(hint: Any) -> tuple[type, ...]:
    """Tensor | None -> (Tensor, NoneType); float also takes an int."""
    types = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return (*types, int) if float in types else tuple(types)


def _plain_scalar(value: Any, kind: Kind) -> Any:
    """np.float64 is a float and True an int, but not by their own type: made what the parameter takes."""
    if type(value) in kind.types or isinstance(value, Tensor):
        return value
    return next((plain(value) for plain in (float, int) if plain in kind.types and isinstance(value, plain)), value)
