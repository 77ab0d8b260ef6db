"""Compiles kernels in a child process: in this one Triton may be interpreting, and a compiler may crash or hang."""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tilery.errors import CompileFailed
from tilery.op import Op
from tilery.spec import Artifact, Case, TensorSpec
from tilery.workbench.child import Child, Died, serve


def specs_for(op: Op, case: Case, device: str = "cuda:0") -> tuple[Any, ...]:
    """The specs that the case's inputs would have on `device`, which need not be there: nothing is drawn."""
    with FakeTensorMode():
        args = op.complete((), op.inputs(**case.params, device="cpu", seed=0))
    where = torch.device(device)
    tensors = {id(a): TensorSpec.of(a, _aligned(a))._replace(device=where) for a in args if isinstance(a, Tensor)}
    return tuple(tensors.get(id(a), a) for a, n in zip(args, op.names) if n not in op.runtime)


def _aligned(t: Tensor) -> bool:
    """As freshly allocated memory would be, some elements in."""
    return int(t.storage_offset()) * t.itemsize % 16 == 0


class Compiler:
    """One child that compiles what it is asked, one request after another. A context manager."""

    def __init__(self, pythonpath: Path | None = None, timeout_s: float = 120.0) -> None:
        """`pythonpath` goes before what is installed: another Triton, say."""
        self._child = Child("tilery.workbench.compile", timeout_s, pythonpath)

    def __enter__(self) -> "Compiler":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._child.close()

    def compile(self, op: str, kernel: str, specs: tuple[Any, ...], arch: str, config: Any = None) -> Artifact:
        """config None: the kernel's default for these specs on this architecture."""
        what = f"{op} {kernel} does not build for {arch}"
        self._child.send((op, kernel, specs, config, arch))
        try:
            answer: Artifact | str = self._child.receive()
        except Died as died:
            raise CompileFailed(f"{what}: {died}") from None
        if isinstance(answer, str):
            raise CompileFailed(f"{what}:\n{answer}")
        return answer


def _answer(request: tuple[Any, ...], send: Callable[[Any], None]) -> None:
    import tilery.ops  # noqa: F401  fills the registry
    from tilery import device
    from tilery.op import REGISTRY

    op, kernel, specs, config, arch = request
    try:
        module = REGISTRY[op].kernel(kernel)
        with device.pretend(arch):
            made: Artifact | str = module.compile(specs, config or module.default(*specs), arch)
    except Exception:  # whatever a compiler raises is the answer, whole
        made = traceback.format_exc()
    send(made)


if __name__ == "__main__":
    serve(_answer)
