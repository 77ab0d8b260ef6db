"""GPU kernels for language models: written, checked, tuned, measured, explained and used, in every tile language."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tilery.catalogue import OPS

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tilery import patch as patch
    from tilery import tuning as tuning
    from tilery.base import errors as errors
    from tilery.core.policy import explain_dispatch as explain_dispatch
    from tilery.ops import *  # noqa: F403
    from tilery.patch import audit as audit
    from tilery.patch import register_attention as register_attention
    from tilery.patch import unpatch as unpatch
    from tilery.tuning import tune as tune

# Imported on first use, so that `tilery --help` does not wait for torch.
_MODULES = ("errors", "patch", "tuning")
_PUBLIC = {
    "explain_dispatch": "tilery.core.policy",
    "tune": "tilery.tuning",
    "audit": "tilery.patch",
    "register_attention": "tilery.patch",
    "unpatch": "tilery.patch",
} | dict.fromkeys(OPS, "tilery.ops")
__all__ = ["__version__", *_MODULES, *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"tilery.{name}")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'tilery' has no attribute {name!r}")
    value = getattr(import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
