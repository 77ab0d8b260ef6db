"""A terminal of a given width for tests: a pty in the place of stdout."""

import contextlib
import fcntl
import os
import re
import struct
import sys
import termios
import threading

_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def opened(width):
    """(what is read from, what a program writes to) of a terminal with so many columns."""
    reader, writer = os.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    return reader, writer


def plain(data):
    return _COLOURS.sub("", data.decode()).replace("\r\n", "\n")


def read_all(reader):
    """All that is written until the last writer is closed."""
    parts = []
    with contextlib.suppress(OSError):  # EIO: no one writes any more
        while part := os.read(reader, 65536):
            parts.append(part)
    os.close(reader)
    return b"".join(parts)


def printed(monkeypatch, width, action):
    """What `action` prints on a terminal that is so wide, without colours."""
    reader, writer = opened(width)
    found = []
    thread = threading.Thread(target=lambda: found.append(read_all(reader)))  # a full pty blocks who writes
    thread.start()
    with monkeypatch.context() as patch:
        patch.delenv("COLUMNS", raising=False)
        patch.setenv("TERM", "xterm")
        with open(writer, "w", encoding="utf-8") as file:
            patch.setattr(sys, "stdout", file)
            action()
    thread.join()
    return plain(found[0])
