"""Every op. Importing this fills the registry, third parties' ops and kernels included."""

from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from tilery import languages
from tilery.catalogue import OPS
from tilery.core.op import REGISTRY

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


__all__ = list(OPS)
globals().update({name: getattr(import_module(f"tilery.ops.{module}"), name) for name, module in OPS.items()})


def load_plugins() -> None:
    """Entry points: `tilery.languages` a Language, `tilery.ops` a module, `tilery.kernels` OP/KERNEL a Kernel."""
    for entry in entry_points(group="tilery.languages"):
        languages.LANGUAGES[entry.name] = entry.load()
    for entry in entry_points(group="tilery.ops"):
        import_module(entry.value)
    for entry in entry_points(group="tilery.kernels"):
        op, _, kernel = entry.name.partition("/")
        REGISTRY[op].add_kernel(kernel, entry.value)


load_plugins()
