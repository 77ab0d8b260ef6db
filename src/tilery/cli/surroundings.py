"""What a command may meet where it runs: a terminal without Unicode, a closed pipe, a full disk, Ctrl-C twice."""

import atexit
import codecs
import contextlib
import errno
import os
import signal
import sys
import unicodedata
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import typer
from typer.core import TyperGroup

INTERRUPTED = 130
_PACKAGE = str(Path(__file__).parents[1])
_SPELT = {
    "×": "x", "·": "*", "µ": "u", "μ": "u", "…": "...", "²": "^2", "³": "^3", "ᵀ": "^T", "±": "+-", "−": "-", "–": "-",
    "—": "-", "Σ": "sum", "∇": "grad", "≥": ">=", "≤": "<=", "≈": "~", "→": "->", "°": " deg", "⌈": "ceil(", "⌉": ")",
}  # fmt: skip
# The disk, or what this user may do: never a mistake in the program.
_NOT_OURS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EIO)


# Printing


def _spell(error: UnicodeError) -> tuple[str, int]:
    """The error handler `tilery`: what an encoding does not have is written in letters that every one has."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_letters, error.object[error.start : error.end])), error.end


def _letters(character: str) -> str:
    if "\udc80" <= character <= "\udcff":  # a byte of a file's name that is no text
        return f"\\x{ord(character) - 0xDC00:02x}"
    plain = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
    return _SPELT.get(character, plain or "?")


codecs.register_error("tilery", _spell)


def printable(text: str) -> str:
    """Text as stdout will show it, so that columns are as wide as they look."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "tilery").decode(encoding)


def _open_closed() -> None:
    """A stream that was closed (`>&-`) is the null device: else the next file opened would get its number."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            with contextlib.suppress(OSError):
                os.fstat(number)
                continue  # open, and not Python's
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
            setattr(sys, name, open(number, mode, encoding="utf-8"))  # noqa: SIM115  for the whole process


def _one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """A warning of ours is a sentence; those of others keep their form."""
    if filename.startswith(_PACKAGE) and issubclass(category, UserWarning):
        return f"tilery: {message}\n"
    return _usual(message, category, filename, lineno, line)


_usual = warnings.formatwarning


# Ctrl-C, and SIGTERM, which is how others end a process


class Verbs(TyperGroup):
    """The verbs: a Ctrl-C or SIGTERM ends each of them with a line that says what is kept."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stopped:
            _kill_children()
            print(f"tilery: stopped; {str(stopped) or 'what was kept until then is whole'}", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None


def _kill_children() -> None:
    for name in ("tilery.measure.child", "tilery.workbench.sanitize"):
        if module := sys.modules.get(name):  # else there are none
            module.kill_all()


class _Interrupts:
    """The first Ctrl-C is a KeyboardInterrupt: children are ended. The next one ends this process at once."""

    def __init__(self) -> None:
        self.came = False
        usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
        # Not where one is ignored, as SIGINT is behind nohup.
        self.before = {number: handler for number, handler in usual.items() if signal.getsignal(number) is handler}

    def install(self) -> None:
        for number in self.before:
            signal.signal(number, self)

    def restore(self) -> None:
        for number, handler in self.before.items() if not self.came else ():
            signal.signal(number, handler)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.came:
            self._end_at_once()
        self.came = True
        # Python's last steps give signals back to the system, which would end the process without an exit code.
        for signalled in self.before:
            atexit.register(signal.signal, signalled, signal.SIG_IGN)
        raise KeyboardInterrupt

    def _end_at_once(self) -> None:
        _kill_children()
        with contextlib.suppress(OSError):
            os.write(2, b"tilery: stopped at once; what was kept until then is whole\n")
        os._exit(INTERRUPTED)


# All of it


@contextlib.contextmanager
def prepared() -> Iterator[None]:
    """Makes the streams fit for what is printed, ends on Ctrl-C, and says in a line what the disk does not take."""
    _open_closed()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="tilery")
    interrupts, usual = _Interrupts(), warnings.formatwarning
    interrupts.install()
    warnings.formatwarning = _one_line
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # now, while it can still be said that it does not go
    except BrokenPipeError:
        _forget_stdout()
        sys.exit(1)  # who read it has enough
    except OSError as error:
        if error.errno not in _NOT_OURS:
            raise
        _forget_stdout()
        print(f"tilery: {error.filename or 'the output'} cannot be used: {error.strerror}", file=sys.stderr)
        sys.exit(2)
    finally:
        interrupts.restore()
        warnings.formatwarning = usual


def _forget_stdout() -> None:
    """What is left in its buffer goes nowhere, instead of failing once more when Python ends."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
