"""The proof of a patch: every layer on the same inputs, in torch, patched, and in torch in float32."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tilery.base.errors import Wrong
from tilery.patch.report import Error

TOKENS = (24, 4)  # one for attention and one for attention_decode, which takes 16 at most
_FLOOR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}  # of what a layer adds
_ROUNDINGS = 4  # of the whole output, besides
_WORSE = 2  # so many times the error that torch makes may a patched layer make


@dataclass(frozen=True)
class Target:
    """A module whose output is compared."""

    module: nn.Module
    adds: bool  # whether its output is its input and something: then that alone counts
    routed: bool  # whether rounding may send a token to another expert: then the median over tokens counts


@dataclass(frozen=True)
class Truth:
    """What the targets took and gave in torch, and what they give in float32, by name."""

    ids: Tensor
    inputs: dict[str, Tensor]
    unpatched: dict[str, Tensor]
    exact: dict[str, Tensor]


def truths(model: PreTrainedModel, targets: Mapping[str, Target]) -> list[Truth]:
    """To be asked for before the model is patched."""
    g = torch.Generator().manual_seed(0)
    return [
        _truth(model, targets, torch.randint(model.config.vocab_size, (2, tokens), generator=g)) for tokens in TOKENS
    ]


def errors(model: PreTrainedModel, targets: Mapping[str, Target], known: list[Truth]) -> list[Error]:
    """Errors of every target as it is now; raises Wrong if one is further off than it may be."""
    found = []
    for truth in known:
        with _watched(targets) as seen:
            for name, target in targets.items():
                seen.keep(target.module.register_forward_pre_hook(_give(truth.inputs[name]), with_kwargs=True))
            _forward(model, truth.ids)
        found += [_error(name, target, truth, seen.outputs[name]) for name, target in targets.items()]
    if bad := [e for e in found if not e.patched <= e.allowed]:
        worst = max(bad, key=lambda e: e.patched / e.allowed if e.patched == e.patched else float("inf"))
        raise Wrong(
            f"{len(bad)} of {len(found)} outputs are further from float32 than they may be, most of all {worst.module} "
            f"with {worst.tokens} tokens: {worst.patched:.1e}, where {worst.allowed:.1e} is allowed and torch has "
            f"{worst.unpatched:.1e}; the patch is taken back. tilery.patch(model, ops=…) leaves out a piece",
            worst.patched, worst.allowed,
        )  # fmt: skip
    return found


def _truth(model: PreTrainedModel, targets: Mapping[str, Target], ids: Tensor) -> Truth:
    with _watched(targets) as seen:
        _forward(model, ids)
    own = model.config._attn_implementation
    model.set_attn_implementation("eager")  # it is there in every dtype; its masks are tensors
    try:
        with _watched(targets) as eager:
            _forward(model, ids)
        exact = {
            name: _exact(target.module, seen.inputs[name], eager.options[name]) for name, target in targets.items()
        }
    finally:
        model.set_attn_implementation(own)
    return Truth(ids, seen.inputs, seen.outputs, exact)


@torch.no_grad()
def _exact(module: nn.Module, given: Tensor, options: dict[str, Any]) -> Tensor:
    """The output of the module's copy in float32."""
    return _first(copy.deepcopy(module).eval().float()(given.float(), **_mapped(options, _as_float)))


def _error(name: str, target: Target, truth: Truth, patched: Tensor) -> Error:
    exact, given, unpatched = truth.exact[name], truth.inputs[name], truth.unpatched[name]
    counted = exact - given.float() if target.adds else exact

    def size(x: Tensor) -> float:
        by_token = x.float().pow(2).mean(-1)
        return float((by_token.median() if target.routed else by_token.mean()).sqrt())

    whole = size(counted) or 1.0
    ours, theirs = size(patched.float() - exact) / whole, size(unpatched.float() - exact) / whole
    roundings = _ROUNDINGS * torch.finfo(patched.dtype).eps * size(exact) / whole
    return Error(name, exact.shape[1], ours, theirs, max(_WORSE * theirs, _FLOOR[patched.dtype] + roundings))


# Watching a forward


class _Seen:
    """What the targets of one forward took and gave."""

    def __init__(self, stack: ExitStack) -> None:
        self.inputs: dict[str, Tensor] = {}
        self.options: dict[str, dict[str, Any]] = {}
        self.outputs: dict[str, Tensor] = {}
        self._stack = stack

    def keep(self, handle: Any) -> None:
        self._stack.callback(handle.remove)


@contextmanager
def _watched(targets: Mapping[str, Target]) -> Iterator[_Seen]:
    with ExitStack() as stack:
        seen = _Seen(stack)
        for name, target in targets.items():
            seen.keep(target.module.register_forward_hook(_look(name, seen), with_kwargs=True))
        yield seen


def _look(name: str, seen: _Seen) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        seen.inputs[name], seen.options[name], seen.outputs[name] = args[0].clone(), kwargs, _first(output).clone()

    return hook


def _give(given: Tensor) -> Callable[..., Any]:
    """Every layer takes what it took in torch, so that errors do not add up."""
    return lambda module, args, kwargs: ((given.clone(), *args[1:]), kwargs)


@torch.no_grad()
def _forward(model: PreTrainedModel, ids: Tensor) -> None:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        model(input_ids=ids.to(model.device), use_cache=False)
    finally:
        for module, mode in modes:
            module.training = mode


def _first(output: Any) -> Tensor:
    found: Tensor = output[0] if isinstance(output, tuple) else output
    return found


def _mapped(value: Any, to: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {name: _mapped(each, to) for name, each in value.items()}
    return tuple(_mapped(each, to) for each in value) if isinstance(value, tuple) else to(value)


def _as_float(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
