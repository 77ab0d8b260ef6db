"""Every op. Importing this fills the registry, third parties' ops and kernels included."""

from importlib import import_module
from importlib.metadata import entry_points

from tilery import backends
from tilery.op import REGISTRY
from tilery.ops.matmul import linear, matmul
from tilery.ops.rms_norm import rms_norm
from tilery.ops.silu_mul import silu_mul
from tilery.ops.softmax import softmax

__all__ = ["linear", "matmul", "rms_norm", "silu_mul", "softmax"]


def load_plugins() -> None:
    """Entry points `tilery.languages` (a Language), `tilery.ops` (a module), `tilery.kernels` (OP/KERNEL, a module)."""
    for entry in entry_points(group="tilery.languages"):
        backends.LANGUAGES[entry.name] = entry.load()
    for entry in entry_points(group="tilery.ops"):
        import_module(entry.value)
    for entry in entry_points(group="tilery.kernels"):
        op, _, kernel = entry.name.partition("/")
        REGISTRY[op].add_kernel(kernel, entry.value)


load_plugins()
