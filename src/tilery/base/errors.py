"""Every error that a user can meet, by name. A message says what was expected, what came and what to do."""


class TileryError(Exception):
    """The root of all of them."""


class BadInput(TileryError, ValueError):
    """The call is not what the op's signature and check say."""


class NoBackend(TileryError, RuntimeError):
    """No kernel takes this problem; the message lists every kernel's refusal."""


class NoBackward(TileryError, RuntimeError):
    """The op has no backward and a named argument requires grad."""


class Wrong(TileryError, AssertionError):
    """A kernel breaks its op's contract, or a patched model its promise; the message says how."""

    def __init__(self, message: str, error: float | None = None, allowed: float | None = None) -> None:
        super().__init__(message)
        self.error, self.allowed = error, allowed  # of the output that is wrong, where one is compared


class CompileFailed(TileryError, RuntimeError):
    """A kernel does not build for an architecture; the message ends with what the compiler said."""


class ToolMissing(TileryError, RuntimeError):
    """A program or package that this needs is not here; the message holds the command that adds it."""


class BadTunedFile(TileryError, ValueError):
    """A tuned-config file cannot be read; the message names the file and the line."""


class NotWritten(TileryError, RuntimeError):
    """A file cannot be written; the message names it and says why, and what it held is as it was."""


class BadStore(TileryError, RuntimeError):
    """The store of runs cannot be read; the message names the file, which stays as it is."""


class BadSetting(TileryError, ValueError):
    """An environment variable or setting has a value that is not one of those it may have."""


def require(ok: bool, message: str) -> None:
    """Raises BadInput unless ok."""
    if not ok:
        raise BadInput(message)
