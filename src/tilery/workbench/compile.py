"""Compiles kernels in a child process: in this one Triton may be interpreting, and a compiler may crash or hang.

The child is kept for the next request, since starting one costs an import of torch. All that crosses is plain data.
"""

import contextlib
import os
import pickle
import select
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch

from tilery.errors import CompileFailed
from tilery.op import Op
from tilery.spec import Artifact, Case, TensorSpec

_LENGTH = 8  # bytes before every message


def specs_for(op: Op, case: Case, device: str = "cuda:0") -> tuple[Any, ...]:
    """The specs that the case's inputs would have on `device`, which need not be there."""
    given = op.specs(op.complete((), op.inputs(**case.params, device="cpu", seed=0)))
    return tuple(s._replace(device=torch.device(device)) if isinstance(s, TensorSpec) else s for s in given)


class Compiler:
    """One child that compiles what it is asked, one request after another. A context manager."""

    def __init__(self, pythonpath: Path | None = None, timeout_s: float = 120.0) -> None:
        """`pythonpath` goes before what is installed: another Triton, say."""
        self.pythonpath, self.timeout_s = pythonpath, timeout_s
        self._child: subprocess.Popen[bytes] | None = None
        self._stderr: Any = None

    def __enter__(self) -> "Compiler":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def compile(self, op: str, kernel: str, specs: tuple[Any, ...], arch: str, config: Any = None) -> Artifact:
        """config None: the kernel's default for these specs on this architecture."""
        answer = self._ask((op, kernel, specs, config, arch), f"{op} {kernel} for {arch}")
        if isinstance(answer, str):
            raise CompileFailed(f"{op} {kernel} does not build for {arch}:\n{answer}")
        return answer

    def _ask(self, request: Any, what: str) -> Any:
        if self._child is None:
            self._start()
        child = self._child
        assert child is not None and child.stdin is not None and child.stdout is not None
        try:
            _send(child.stdin, request)
            ready, _, _ = select.select([child.stdout], [], [], self.timeout_s)
            if ready:
                return _receive(child.stdout)
            reason = f"no answer within {self.timeout_s:.0f} s"
        except (EOFError, BrokenPipeError):
            reason = f"the compiler's process died with code {child.wait()}"
        self._stderr.seek(0)
        said = self._stderr.read()[-4000:]
        self.close()
        raise CompileFailed(f"{what}: {reason}\n{said}")

    def _start(self) -> None:
        env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        source = str(Path(__file__).parents[2])  # so that a checkout works uninstalled
        paths = [str(self.pythonpath)] if self.pythonpath else []
        env["PYTHONPATH"] = os.pathsep.join([*paths, source, *filter(None, [env.get("PYTHONPATH")])])
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the child
        command = [sys.executable, "-m", "tilery.workbench.compile"]
        pipe = subprocess.PIPE
        self._child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._stderr, env=env)

    def close(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            for stream in (self._child.stdin, self._child.stdout, self._stderr):
                with contextlib.suppress(BrokenPipeError):
                    stream.close()  # type: ignore[union-attr]
            self._child = None


def _send(stream: Any, message: Any) -> None:
    data = pickle.dumps(message)
    stream.write(len(data).to_bytes(_LENGTH, "big") + data)
    stream.flush()


def _receive(stream: Any) -> Any:
    header = stream.read(_LENGTH)
    if len(header) < _LENGTH:
        raise EOFError
    return pickle.loads(stream.read(int.from_bytes(header, "big")))


def _serve() -> None:
    """In the child. What compilers print goes to stderr: stdout carries the answers."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    import tilery.ops  # noqa: F401  fills the registry
    from tilery import device
    from tilery.op import REGISTRY

    with contextlib.suppress(EOFError):
        while True:
            op, kernel, specs, config, arch = _receive(sys.stdin.buffer)
            try:
                module = REGISTRY[op].kernel(kernel)
                with device.pretend(arch):
                    answer = module.compile(specs, config or module.default(*specs), arch)
            except Exception:  # whatever a compiler raises is the answer, whole
                answer = traceback.format_exc()
            _send(answers, answer)


if __name__ == "__main__":
    _serve()
