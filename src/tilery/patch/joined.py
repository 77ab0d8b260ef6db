"""Weights of several linear layers in one buffer, of which their parameters are views: one product for all of them."""

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tilery.patch.swap import hooked

_LOCK = threading.Lock()  # two threads that find the views gone join them once


def refusal(layers: Sequence[nn.Module]) -> str | None:
    """Why these layers cannot share a product, in a sentence; None if they can."""
    first = layers[0]
    for layer in layers:
        if type(layer) is not nn.Linear:
            return f"a projection is a {type(layer).__name__}, not torch's Linear"
        if type(layer.weight) is not nn.Parameter or type(layer.weight.data) is not Tensor:
            return f"a projection's weight is a {type(layer.weight).__name__}, not a plain parameter"
        if hooked(layer):
            return "a hook watches one of the projections"
        weight, other = layer.weight, first.weight
        if (weight.dtype, weight.device) != (other.dtype, other.device):
            return "the projections differ in dtype or device"
        if (layer.bias is None) != (first.bias is None):
            return "one projection has a bias and another has none"
    return None


class Joined:
    """The weights of the layers `names` of a module. Whoever moves or replaces a parameter is followed."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self._buffers: dict[str, Tensor] = {}

    def parts(self, module: nn.Module) -> tuple[Tensor, Tensor | None] | None:
        """(weight, bias) of all layers, one below the other; None where a hook must see each layer's call."""
        layers = [getattr(module, name) for name in self.names]
        if any(hooked(layer) for layer in layers):
            return None
        weight = self._whole("weight", [layer.weight for layer in layers])
        return weight, None if layers[0].bias is None else self._whole("bias", [layer.bias for layer in layers])

    def split(self, module: nn.Module) -> None:
        """Give every layer memory of its own again."""
        for name in self.names if len(self.names) > 1 else ():
            for parameter in getattr(module, name).parameters(recurse=False):
                _set_data(parameter, parameter.detach().clone())
        self._buffers.clear()

    def __getstate__(self) -> Any:
        """A copy joins the copied parameters when it is first called."""
        return {"names": self.names, "_buffers": {}}

    def _whole(self, kind: str, parts: list[nn.Parameter]) -> Tensor:
        if len(parts) == 1:
            return parts[0]
        whole = self._buffers.get(kind)
        if not torch.compiler.is_compiling() and not _are_views(whole, parts):
            with _LOCK:
                whole = self._buffers.get(kind)
                if not _are_views(whole, parts):
                    whole = self._buffers[kind] = _join(parts)
        assert whole is not None, "a module is joined before it is traced"
        if torch.is_grad_enabled() and any(part.requires_grad for part in parts):
            made: Tensor = _Whole.apply(whole, *parts)
            return made
        return whole


class _Whole(torch.autograd.Function):
    """The buffer, whose gradient is handed to the parameters that are its views."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, *parts: Tensor) -> Tensor:  # type: ignore[override]
        ctx.sizes = [len(part) for part in parts]
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return None, *grad.split(ctx.sizes)


def _are_views(whole: Tensor | None, parts: list[nn.Parameter]) -> bool:
    if whole is None or whole.dtype != parts[0].dtype or whole.device != parts[0].device:
        return False
    at = whole.data_ptr()
    for part in parts:
        if part.data_ptr() != at or not part.is_contiguous():
            return False
        at += part.nbytes
    return at == whole.data_ptr() + whole.nbytes


@torch.inference_mode(False)
@torch.no_grad()
def _join(parts: list[nn.Parameter]) -> Tensor:
    whole = torch.cat([part.detach() for part in parts])
    for part, view in zip(parts, whole.split([len(part) for part in parts])):
        part.data = view
    return whole


@torch.inference_mode(False)
def _set_data(parameter: nn.Parameter, data: Tensor) -> None:
    parameter.data = data
