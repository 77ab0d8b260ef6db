"""Compiles kernels in a child process: in this one Triton may be interpreting, and a compiler may crash or hang."""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tilery.base.errors import CompileFailed
from tilery.base.spec import Artifact
from tilery.measure.child import Child, Died, serve


class Compiler:
    """One child that compiles what it is asked, one request after another. A context manager."""

    def __init__(self, pythonpath: Path | None = None, timeout_s: float = 120.0) -> None:
        """`pythonpath` goes before what is installed: another Triton, say."""
        self._child = Child("tilery.measure.compile", timeout_s, pythonpath)

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
    from tilery.core import policy
    from tilery.core.op import REGISTRY
    from tilery.hardware import device

    name, kernel, specs, config, arch = request
    try:
        with device.pretend(arch):
            op = REGISTRY[name]
            call = op.call(specs)
            made: Artifact | str = policy.compiled(op, kernel, call, config or op.kernel(kernel).default(call), arch)
    except Exception:  # whatever a compiler raises is the answer, whole
        made = traceback.format_exc()
    send(made)


if __name__ == "__main__":
    serve(_answer)
