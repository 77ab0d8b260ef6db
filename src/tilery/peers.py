"""Who we are held against: what else a user could run. A contract's `baselines` name them; they are loaded if there."""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Peer(NamedTuple):
    module: str = "torch"  # what must be importable
    package: str = "torch"  # what pip calls it
    gpu: bool = True  # it runs on a GPU alone


PEERS = {
    "torch": Peer(gpu=False),
    "compile": Peer(gpu=False),  # torch.compile
    "cublaslt": Peer(),  # as torch's scaled_mm calls it
    "cudnn": Peer(),  # as torch's attention calls it
    "fa2": Peer("flash_attn", "flash-attn"),
    "liger": Peer("liger_kernel", "liger-kernel"),
    "tilegym": Peer("tilegym", "tilegym"),
    "quack": Peer("quack", "quack-kernels"),
    "flashinfer": Peer("flashinfer", "flashinfer-python"),
    "deepgemm": Peer("deep_gemm", "deep-gemm"),
}


def missing(name: str) -> str | None:
    """Why the peer cannot be run here, with the command that adds it."""
    peer = PEERS[name]
    if importlib.util.find_spec(peer.module) is None:
        return f"{peer.package} is not installed: pip install {peer.package}"
    if peer.gpu and not torch.cuda.is_available():
        return "needs a GPU"
    return None


def baselines(**functions: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """A contract's peers by name; what they need is imported inside the functions, with `load`."""
    unknown = set(functions) - set(PEERS)
    assert not unknown, f"no such peer: {unknown}"
    return {f"baseline:{name}": function for name, function in functions.items()}


def load(module: str) -> Any:
    return importlib.import_module(module)


class Compiled:
    """A function under torch.compile at its best: each shape for itself, configs tried on the device."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self._shapes: list[Any] | None = None
        self._made: Callable[..., Any] = function

    def __call__(self, *args: Any) -> Any:
        shapes = [(a.shape, a.dtype) if isinstance(a, Tensor) else a for a in args]
        if shapes != self._shapes:
            torch._dynamo.reset()  # after eight shapes it would give up and run uncompiled
            mode = "max-autotune-no-cudagraphs" if torch.cuda.is_available() else "default"  # the timer makes graphs
            self._shapes, self._made = shapes, torch.compile(self.function, dynamic=False, fullgraph=True, mode=mode)
        return self._made(*args)
