"""Another forward for one module: its class becomes a subclass of its own class, and goes back to it.

So other instances of the class keep theirs, hooks and gradient checkpointing go on, and a copy of the module is
patched as the module is.
"""

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

STATE = "tilery_patch"  # the attribute of a patched module that holds what its forward needs


def refusal(module: nn.Module) -> str | None:
    """Why the module's forward cannot be replaced, in a sentence; None if it can."""
    mine = vars(module)
    if "forward" not in mine or _hook_of_accelerate(module):
        return None
    return "another tool has replaced its forward"


def replace_forward(module: nn.Module, forward: Callable[..., Any], state: Any) -> None:
    base: Any = type(module)
    setattr(module, STATE, state)
    _set_class(module, _subclass(base, forward))


def restore_forward(module: nn.Module) -> None:
    _set_class(module, original_class(module))
    delattr(module, STATE)


def original_class(module: nn.Module) -> type:
    """The class that a module has without a patch."""
    found: type = getattr(type(module), "_tilery_base", type(module))
    return found


def hooked(module: nn.Module) -> bool:
    """Whether somebody watches the calls of this module, so that it must be called."""
    mine = vars(module)
    return "forward" in mine or any(
        mine[kind] for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    )


@functools.cache
def _subclass(base: type, forward: Callable[..., Any]) -> type:
    def reduced(self: Any, protocol: int) -> Any:
        return _remade, (base, forward), vars(self)

    names = {"forward": forward, "_tilery_base": base, "__module__": base.__module__, "__reduce_ex__": reduced}
    return type(base.__name__, (base,), names)


def _remade(base: type, forward: Callable[..., Any]) -> Any:
    """An empty patched module, which a copy or a pickle fills."""
    made: Any = _subclass(base, forward)
    return made.__new__(made)


def _hook_of_accelerate(module: nn.Module) -> bool:
    """accelerate's hooks call what `_old_forward` holds: the module's own forward, bound."""
    old = vars(module).get("_old_forward")
    return isinstance(old, MethodType) and old.__func__ is type(module).forward


def _set_class(module: nn.Module, to: type) -> None:
    below_hook = _hook_of_accelerate(module)
    module.__class__ = to
    if below_hook:
        module._old_forward = MethodType(to.forward, module)  # type: ignore
