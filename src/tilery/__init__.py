"""GPU kernels for language models: written, checked, tuned, measured, explained and used, in every tile language."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tilery import errors as errors
    from tilery.dispatch import explain_dispatch as explain_dispatch
    from tilery.ops import linear as linear
    from tilery.ops import matmul as matmul  # type: ignore[no-redef]  # the op, not its folder
    from tilery.ops import rms_norm as rms_norm  # type: ignore[no-redef]
    from tilery.ops import silu_mul as silu_mul  # type: ignore[no-redef]
    from tilery.ops import softmax as softmax  # type: ignore[no-redef]

# Imported on first use, so that `tilery --help` does not wait for torch.
_PUBLIC = {
    "explain_dispatch": "tilery.dispatch",
    "linear": "tilery.ops",
    "matmul": "tilery.ops",
    "rms_norm": "tilery.ops",
    "silu_mul": "tilery.ops",
    "softmax": "tilery.ops",
}
__all__ = ["__version__", "errors", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("tilery.errors")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'tilery' has no attribute {name!r}")
    value = getattr(import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
