"""Numba on the CPU: compile a launch, and run it on as many threads as its config asks for.

In a `Launch`, `kernel` is a function decorated by `kernel`. Its first parameter, `threads`, is filled in here: 1, or
with `options["parallel"]` all of Numba's. Tensors are passed as addresses; numba_elements.py reads and writes elements.
"""

import contextlib
import functools
import hashlib
import inspect
import os
import pickle
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba
import torch
from numba import types
from numba.core.caching import FunctionCache, IndexDataCacheFile

from tilery.base import settings
from tilery.base.launch import Argument, Launch, Scalar, Values, argument_mismatch, assert_plain, resolver
from tilery.base.spec import Artifact, TensorSpec

_config: Any = numba.config

# `reassoc` lets a sum run in vector lanes, also the more accurate order. Never nnan or ninf: both must come through.
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": {"reassoc", "contract", "nsz"}}

jit = numba.njit(**_OPTIONS)


@functools.cache
def _folder() -> str | None:
    """Where compiled code is kept. Numba does not notice edits of helpers, so the name holds the text of them all."""
    package = Path(__file__).parents[1]
    names = ("languages/numba_*.py", "ops/**/*.py")  # constants of files in plain Python are in the code too
    helpers = sorted(path for name in names for path in package.glob(name))
    name = hashlib.sha256(b"".join(p.read_bytes() for p in helpers)).hexdigest()[:12]
    folder = Path(_config.CACHE_DIR or settings.get().cache_dir / "numba") / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return str(folder)
    except OSError as error:  # Numba would go to another place and not say so
        warnings.warn(f"{folder} cannot keep compiled kernels, every process will build them: {error}", stacklevel=2)
        return None


def kernel(function: Any) -> Any:
    """Compiled on first use, kept on disk."""
    made, folder, users = numba.njit(parallel=True, **_OPTIONS)(function), _folder(), _config.CACHE_DIR
    if _config.DISABLE_JIT or folder is None:
        return made
    _config.CACHE_DIR = folder  # read while the cache is made; the user's own kernels keep their folder
    try:
        made._cache = _KernelCache(function)
    finally:
        _config.CACHE_DIR = users
    return made


def machine_refusal() -> str | None:
    """Why no kernel of Numba's can run in this process."""
    if _config.DISABLE_JIT:
        return "Numba does not compile while NUMBA_DISABLE_JIT is set: unset it before Python starts"
    return None


# Launches

_lock = threading.Lock()
_concurrent = False  # whether Numba's threads bear calls from several threads: known once they run
_threads: int = _config.NUMBA_NUM_THREADS


def _after_fork() -> None:
    global _threads, _lock
    _threads, _lock = 1, threading.Lock()  # GNU's OpenMP would abort a forked child


os.register_at_fork(after_in_child=_after_fork)


def threads(parallel: bool) -> int:
    return _threads if parallel else 1


def bind(launch: Launch, where: torch.device) -> Callable[[Values], None]:
    """What runs the launch for a call's values."""
    assert_plain(launch)
    kernel, parallel = launch.kernel, launch.options.get("parallel", False)
    resolved = resolver(_ordered(launch), _of_tensor)

    def run(values: Values) -> None:
        count = _threads if parallel else 1
        if _concurrent:
            kernel(count, *resolved(values))
        else:
            _run_alone(kernel, count, resolved(values))

    return run


def _run_alone(kernel: Any, count: int, arguments: list[Any]) -> None:
    """The first calls, before it is known whether Numba's threads bear calls from several of ours."""
    global _concurrent
    with _lock, _kept_threads():
        kernel(count, *arguments)
        with contextlib.suppress(ValueError):  # no kernel has asked for threads yet, and numba does not know
            _concurrent = numba.threading_layer() != "workqueue"


def _of_tensor(x: Argument) -> Callable[[Values], Any]:
    return x.address


def _ordered(launch: Launch) -> tuple[Any, ...]:
    """Arguments and constants in the order of the kernel's parameters, but for the first, which is `threads`."""
    given, names = {**launch.args, **launch.constants}, inspect.signature(launch.kernel.py_func).parameters
    first, *rest = names
    assert first == "threads", f"the first parameter of {launch.kernel.__name__} must be threads, got {first}"
    assert not (wrong := argument_mismatch(launch.kernel.__name__, rest, given)), wrong
    return tuple(given[name] for name in rest)


@contextlib.contextmanager
def _kept_threads() -> Iterator[None]:
    """Keep torch's number of threads, which Numba sets for both when it starts its own: they share OpenMP.

    A user who set it to 1 may mean to fork: in a child, torch would wait for threads that are not there.
    """
    before = torch.get_num_threads()
    yield
    if torch.get_num_threads() != before:
        torch.set_num_threads(before)


def compile(launch: Launch, arch: str) -> Artifact:
    return _compiled(launch.kernel, (types.int64, *map(_type_of, _ordered(launch))))


def _type_of(value: Any) -> Any:
    if isinstance(value, TensorSpec):
        return types.int64
    if isinstance(value, tuple):
        return types.Tuple([_type_of(each) for each in value])
    return numba.typeof(value.example if isinstance(value, Scalar) else value)


def _compiled(kernel: Any, signature: tuple[Any, ...]) -> Artifact:
    """From the disk where it is there: Numba keeps IR too, for callers to inline, and assembly is made of that."""
    with _kept_threads():
        kernel.compile(signature)
    library = kernel.overloads[signature].library
    module = library._get_module_for_linking().clone()  # LLVM changes what it makes assembly of
    return Artifact("cpu", {"ir": str(module), "asm": library.codegen._tm.emit_assembly(module)})


# Compiled code on disk

_HASH = hashlib.sha256().digest_size  # bytes before the content of a file: one that is damaged is built anew


class _HashedFiles(IndexDataCacheFile):
    """Numba's index and data files, whose first bytes are the hash of the rest."""

    def _load_index(self) -> dict[Any, str]:
        try:
            version, stamp, overloads = pickle.loads(_read(self._index_path))
        except OSError:  # not there, or damaged: what it named is built and named again
            return {}
        return overloads if (version, stamp) == (self._version, self._source_stamp) else {}

    def _save_index(self, overloads: dict[Any, str]) -> None:
        self._write(self._index_path, (self._version, self._source_stamp, overloads))

    def _load_data(self, name: str) -> Any:
        return pickle.loads(_read(self._data_path(name)))

    def _save_data(self, name: str, data: Any) -> None:
        self._write(self._data_path(name), data)

    def _write(self, path: str, content: Any) -> None:
        data = self._dump(content)
        with self._open_for_write(path) as file:
            file.write(hashlib.sha256(data).digest() + data)


def _read(path: str) -> bytes:
    """The content of a whole file; OSError, which Numba takes for a file that is not there, of a damaged one."""
    data = Path(path).read_bytes()
    if hashlib.sha256(data[_HASH:]).digest() != data[:_HASH]:
        raise OSError(f"{path} is damaged")
    return data[_HASH:]


class _KernelCache(FunctionCache):
    """A kernel's cache. A full disk costs what it would have kept, not the call."""

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        base, stamp = self._impl.filename_base, self._impl.locator.get_source_stamp()
        self._cache_file = _HashedFiles(self._cache_path, base, stamp)

    def _save_overload(self, signature: Any, data: Any) -> None:
        try:
            super()._save_overload(signature, data)
        except OSError as error:
            what = f"{self._cache_path} cannot keep compiled kernels, each process builds them: {error}"
            warnings.warn(what, stacklevel=2)
