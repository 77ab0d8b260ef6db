"""Who we are held against: what else a user could run. A contract's `baselines` name them; they are loaded if there."""

import importlib
import importlib.util
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


class Peer(NamedTuple):
    module: str = "torch"  # what must be importable
    package: str = "torch"  # what pip calls it
    gpu: bool = True  # it runs on a GPU alone
    source: str = ""  # where it is built from, if what pip calls so is not it


PEERS = {
    "torch": Peer(gpu=False),
    "compile": Peer(gpu=False),  # torch.compile
    "loop": Peer(gpu=False),  # a torch call for each part, sizes known to the host
    "cublaslt": Peer(),  # as torch's scaled_mm calls it
    "cudnn": Peer(),  # as torch's attention calls it
    "cudnn_each": Peer(),  # the same, a call for each token
    "flash": Peer(),  # FlashAttention-2, as torch's attention calls it
    "fa2": Peer("flash_attn", "flash-attn"),
    "liger": Peer("liger_kernel", "liger-kernel"),
    "tilegym": Peer("tilegym", "tilegym"),
    "quack": Peer("quack", "quack-kernels"),
    "flashinfer": Peer("flashinfer", "flashinfer-python"),
    "deepgemm": Peer("deep_gemm", "DeepGEMM", source="https://github.com/deepseek-ai/DeepGEMM"),
}


def missing(name: str) -> str | None:
    """Why the peer cannot be run here, and how to add it."""
    peer = PEERS[name]
    if importlib.util.find_spec(peer.module) is None:
        how = f"build it from {peer.source}" if peer.source else f"pip install {peer.package}"
        return f"{peer.package} is not installed: {how}"
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
            self._shapes = shapes
            self._made = torch.compile(self.function, dynamic=False, fullgraph=True, options=_compile_options())
        return self._made(*args)


def _compile_options() -> dict[str, Any]:
    """All that makes it faster: configs tried on the device, and launches that overlap, as ours do, from sm_90 on."""
    if not torch.cuda.is_available():
        return {}
    options = torch._inductor.list_mode_options("max-autotune-no-cudagraphs")  # the timer makes graphs
    options["autotune_local_cache"] = False  # what it once chose on a busy GPU would stay
    known = torch._inductor.list_options()
    pdl = "triton.enable_pdl" in known and torch.cuda.get_device_capability() >= (9, 0)
    return options | ({"triton.enable_pdl": True} if pdl else {})


class Saved:
    """What a peer knows or keeps before it is called: computed when an x is first seen, so not in the time of an arm.

    It must not hold x, or x would never be freed. While a CUDA graph is captured nothing is kept: only a replay would
    fill it, and another arm would find it.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward
        self._found = WeakTensorKeyDictionary()

    def __call__(self, x: Tensor, *more: Any) -> Any:
        """Computed anew for other values of x, or of what is given beside it."""
        known, found = self._found.get(x, ((), None))
        given = x._version, *more
        if len(known) != len(given) or not all(map(_is, known, given)):
            found = self._forward(x, *more)
            if not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
                self._found[x] = tuple(map(_mark, given)), found
        return found


def _mark(value: Any) -> Any:
    return (weakref.ref(value), value._version) if isinstance(value, Tensor) else value


def _is(mark: Any, value: Any) -> bool:
    """Whether that is the mark of this value."""
    if isinstance(value, Tensor):
        return isinstance(mark, tuple) and mark[0]() is value and mark[1] == value._version
    return bool(mark == value)
