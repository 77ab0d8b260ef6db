"""Compiles what is emulated with g++: the emulator itself, and each instance of a kernel. Kept in the cache folder."""

import contextlib
import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from tilery.base import settings
from tilery.base.errors import CompileFailed, ToolMissing
from tilery.hardware import toolkit
from tilery.languages import cuda_compiler
from tilery.languages.cuda_emulator.translate import translated

_RUNTIME = Path(__file__).parent / "runtime"
# Symbols of a kernel stay its own: two kernels may hold the same function, each with shared memory of its own.
_FLAGS = ("-std=c++17", "-fPIC", "-shared", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE", "-w")
_KERNEL_FLAGS = (*_FLAGS, "-O1", "-fno-gnu-unique", "-fvisibility=hidden")
_RUNTIME_FLAGS = (*_FLAGS, "-O3")


def refusal() -> str | None:
    """Why nothing can be emulated here."""
    if os.uname().sysname != "Linux":
        return "the emulator of CUDA C++ needs Linux"
    try:
        _compiler()
        toolkit.includes()
    except ToolMissing as error:
        return str(error)
    return None


@functools.cache
def _compiler() -> str:
    for name in ("g++", "clang++"):
        if found := shutil.which(name):
            return found
    raise ToolMissing("the emulator of CUDA C++ needs g++: apt-get install g++, or your system's package of it")


@functools.cache
def runtime() -> ctypes.CDLL:
    """The emulator, whose symbols kernels find."""
    sources = sorted(_RUNTIME.glob("*.cpp"))
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(_RUNTIME.iterdir()))
    command = (_compiler(), *_RUNTIME_FLAGS, *_includes(), *map(str, sources))
    place = _place("emulator", text, _RUNTIME_FLAGS)
    return _opened(place, lambda path: _make(path, command, "the emulator"), ctypes.RTLD_GLOBAL)


def kernel(source: Path, instance: str) -> ctypes.CDLL:
    """A library whose function `kernel` runs one thread of this instance of a template."""
    runtime()
    return _opened(library_of(source, instance), lambda path: _make_kernel(path, source, instance))


def library_of(source: Path, instance: str) -> Path:
    """Where the library of an instance is kept, whether it is there or not."""
    included = sorted(cuda_compiler.headers(source.parent).items())
    prelude = (_RUNTIME / "kernel.h").read_text(encoding="utf-8")
    key = "\0".join([_with_entry(source, instance), prelude, *(f"{name}\0{text}" for name, text in included)])
    return _place(source.stem, key, _KERNEL_FLAGS)


def _with_entry(source: Path, instance: str) -> str:
    entry = f"void kernel(void** args) {{ emulator::call(&{instance}, args); }}"
    return f'{source.read_text(encoding="utf-8")}\nextern "C" __attribute__((visibility("default"))) {entry}\n'


def _make_kernel(path: Path, source: Path, instance: str) -> None:
    folders = (cuda_compiler.HEADERS_FOLDER, source.parent)
    flags = ("-E", "-x", "c++", "-std=c++17", "-include", str(_RUNTIME / "kernel.h"), *_includes(*folders), "-")
    plain = _run((_compiler(), *flags), source.name, _with_entry(source, instance))
    with tempfile.NamedTemporaryFile("w", suffix=".ii", encoding="utf-8") as file:
        file.write(translated(plain))
        file.flush()
        _make(path, (_compiler(), *_KERNEL_FLAGS, "-fpreprocessed", file.name), source.name)


def _opened(path: Path, make: Callable[[Path], None], mode: int = ctypes.DEFAULT_MODE) -> ctypes.CDLL:
    """The library; one that is not there, or damaged, is made first."""
    if path.exists():
        with contextlib.suppress(OSError):
            return ctypes.CDLL(str(path), mode=mode)
    make(path)
    return ctypes.CDLL(str(path), mode=mode)


def _includes(*folders: Path) -> tuple[str, ...]:
    return tuple(f"-I{folder}" for folder in (*folders, *toolkit.includes()))


def _place(stem: str, text: str, flags: tuple[str, ...]) -> Path:
    """Where the library of this source is kept, whether it is there or not."""
    key = hashlib.sha256("\0".join([_version(), *flags, *toolkit.includes(), text]).encode()).hexdigest()[:32]
    return settings.get().cache_dir / "cuda_emulator" / f"{stem}-{key}.so"


@functools.cache
def _version() -> str:
    return _run((_compiler(), "--version"), "g++", "").partition("\n")[0]


def _make(path: Path, command: tuple[str, ...], what: str) -> None:
    """Appears whole or not at all, though two processes may build it at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as partial:
        pass
    try:
        _run((*command, "-o", partial.name), what, "")
        os.replace(partial.name, path)
    finally:
        Path(partial.name).unlink(missing_ok=True)


def _run(command: tuple[str, ...], what: str, text: str) -> str:
    done = subprocess.run(command, input=text, capture_output=True, encoding="utf-8")
    if done.returncode:
        errors = "\n".join([line for line in done.stderr.splitlines() if "error" in line][:20]) or done.stderr[-2000:]
        raise CompileFailed(f"{what} does not build for the emulator:\n{errors}")
    return done.stdout
