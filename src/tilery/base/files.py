"""Writing files: whole or not at all, and an error of the disk becomes a sentence that names the file."""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from tilery.base.errors import NotWritten

AS_IT_WAS = "what it held is as it was"
HINT = "free some space, make it writable, or name another place"


def not_written(path: Path, why: object, kept: str = AS_IT_WAS, hint: str = HINT) -> NotWritten:
    """Return the error that says which file cannot be written, why, what is left of it and what to do."""
    return NotWritten(f"{path} cannot be written: {why}; {kept}; {hint}")


@contextlib.contextmanager
def writing(path: Path, kept: str = AS_IT_WAS, hint: str = HINT) -> Iterator[None]:
    """Inside the block, an OSError is raised as NotWritten of this path."""
    try:
        yield
    except OSError as error:
        raise not_written(path, error.strerror or error, kept, hint) from None


def write(path: Path, data: str | bytes) -> None:
    """Write a file that the user named, in a folder that is there. Text is UTF-8."""
    with writing(path):
        replace(path, data)


def replace(path: Path, data: str | bytes) -> None:
    """Write data so that a reader sees the old file or the new one, also after a power cut; raises OSError.

    The target of a link is replaced, not the link. A device, a pipe and the like are written to as they are.
    """
    path = Path(os.path.realpath(path))
    data = data.encode(errors="backslashreplace") if isinstance(data, str) else data
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(path.stat().st_mode):
            path.write_bytes(data)  # a folder: says so
            return
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # a folder that is a file: nothing was made
            partial.unlink()
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
