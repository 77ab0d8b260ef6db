"""A process that works for this one: what may crash, hang or spoil its CUDA context does so there.

Messages are pickles of plain data, over the child's stdin and stdout. What it prints otherwise goes to its stderr, of
which the end is in the error when it dies.
"""

import contextlib
import os
import pickle
import select
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tilery.base.errors import TileryError

_LENGTH = 8  # bytes before every message
_RUNNING: "set[subprocess.Popen[bytes]]" = set()


class Died(Exception):
    """The child ended or was silent for too long; the sentence says which, and what it last printed."""


class Silent(Died):
    """It was silent for too long, and is ended."""


class Child:
    """Started on the first message and kept for the next: starting one costs an import of torch."""

    def __init__(self, module: str, timeout_s: float, pythonpath: Path | None = None) -> None:
        """`pythonpath` goes before what is installed: another Triton, say."""
        self.module, self.timeout_s, self.pythonpath = module, timeout_s, pythonpath
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr: Any = None

    def send(self, message: Any) -> None:
        process = self._process or self._start()
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead: `receive` says so
            _send(process.stdin, message)

    def receive(self) -> Any:
        """The next message; raises Died."""
        process = self._process
        assert process is not None and process.stdout is not None, "nothing was asked"
        try:
            if select.select([process.stdout], [], [], self.timeout_s)[0]:
                return _receive(process.stdout)
            reason = f"no answer within {self.timeout_s:.0f} s"
            kind: type[Died] = Silent
        except EOFError:
            kind = Died
            code = process.wait()
            reason = f"its process was killed by signal {-code}" if code < 0 else f"its process ended with code {code}"
        self._stderr.seek(0)
        said = self._stderr.read()[-4000:].strip()
        self.close()
        raise kind(f"{reason}\n{said}" if said else reason)

    def _start(self) -> "subprocess.Popen[bytes]":
        env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        source = str(Path(__file__).parents[2])  # so that a checkout works uninstalled
        paths = [str(self.pythonpath)] if self.pythonpath else []
        env["PYTHONPATH"] = os.pathsep.join([*paths, source, *filter(None, [env.get("PYTHONPATH")])])
        self._stderr = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  closed below
        pipe = subprocess.PIPE
        command = [sys.executable, "-m", self.module]
        # Unbuffered: what `select` does not see must not lie in a buffer here.
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._stderr, env=env, bufsize=0)
        _RUNNING.add(self._process)
        return self._process

    def close(self) -> None:
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            with contextlib.suppress(BrokenPipeError):
                stream.close()  # type: ignore[union-attr]
        _RUNNING.discard(self._process)
        self._process = None


def kill_all() -> None:
    """Kills every child of this process and waits for none: it is about to end itself."""
    for process in list(_RUNNING):
        process.kill()


def serve(answer: Callable[[Any, Callable[[Any], None]], None]) -> None:
    """In the child: `answer` is given every request and a function that sends messages back."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with contextlib.suppress(EOFError):
        while True:
            answer(_receive(sys.stdin.buffer), lambda message: _send(answers, message))


def relay(
    work: Callable[[Any, Callable[[Any, str], None]], Iterable[Any]],
) -> Callable[[Any, Callable[[Any], None]], None]:
    """What `serve` takes, of work(request, progress) on a GPU: (who, what) as it goes, what it yields, None at the end.

    What it raises ends the process, with its traceback for the parent; an error for the user is sent instead.
    """

    def answer(request: Any, send: Callable[[Any], None]) -> None:
        import torch

        import tilery.ops  # noqa: F401  fills the registry

        def progress(who: Any, what: str) -> None:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # raises if what came before spoilt the context: that is still to blame
            send((who, what))

        try:
            for found in work(request, progress):
                send(found)
        except TileryError as error:
            send(error)
        except Exception:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        send(None)

    return answer


def _send(stream: Any, message: Any) -> None:
    data = pickle.dumps(message)
    rest = memoryview(len(data).to_bytes(_LENGTH, "big") + data)
    while rest:
        rest = rest[stream.write(rest) :]
    stream.flush()


def _receive(stream: Any) -> Any:
    return pickle.loads(_read(stream, int.from_bytes(_read(stream, _LENGTH), "big")))


def _read(stream: Any, count: int) -> bytes:
    parts = b""
    while len(parts) < count:
        part = stream.read(count - len(parts))
        if not part:
            raise EOFError
        parts += part
    return parts
