"""CUDA C++ to cubins through NVRTC, kept on disk. A source may include the headers in include/ and those beside it."""

import ctypes
import functools
import hashlib
import json
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from cuda.bindings import nvrtc

from tilery.base import settings
from tilery.base.errors import CompileFailed, ToolMissing
from tilery.hardware import device, toolkit

HEADERS_FOLDER = Path(__file__).with_name("include")
HEADERS = {path.name: path.read_text(encoding="utf-8") for path in sorted(HEADERS_FOLDER.glob("*.cuh"))}
# Line info is for profilers and sanitizers; the code is the same. CUDA 13.0 takes a lambda with `auto` parameters for
# host code unless all code is the device's.
_OPTIONS = ("--std=c++17", "--generate-line-info", "--device-as-default-execution-space")
_FORMAT = 1  # of a cache entry


def headers(folder: Path | None = None) -> dict[str, str]:
    """What a source in this folder may include, by name: the headers in include/ and those beside it."""
    return HEADERS if folder is None else HEADERS | _beside(folder)


@functools.cache
def _beside(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.cuh"))}


class Built(NamedTuple):
    """What NVRTC made of a source."""

    cubin: bytes
    ptx: str  # to be read
    symbols: dict[str, str]  # name expression -> the kernel's name in the cubin


def compile_source(
    source: str, names: tuple[str, ...], arch: str, options: tuple[str, ...] = (), file: str = "source.cu",
    folder: Path | None = None,
) -> Built:  # fmt: skip
    """The instances `names` of a source, from the disk or built now; it may include the headers of its folder too."""
    target = arch + "a" if device.number(arch) >= 90 else arch  # wgmma and its successors are in "a" alone
    flags = (
        f"--gpu-architecture={target}",
        *_OPTIONS,
        *options,
        *(f"--include-path={path}" for path in toolkit.includes()),
    )
    included = headers(folder)
    key = hashlib.sha256(json.dumps([_FORMAT, _compiler(), flags, names, included, source]).encode()).hexdigest()
    path = settings.get().cache_dir / "cuda" / f"{Path(file).stem}-{arch}-{key[:32]}"
    found = _read(path)
    if found is None:
        found = _build(source, included, names, flags, file, arch)
        _write(path, found)
    return found


def _read(path: Path) -> Built | None:
    """None unless the entry is there and whole: its first 32 bytes are the hash of the rest."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if hashlib.sha256(data[32:]).digest() != data[:32]:
        return None
    entry = json.loads(data[32:])
    return Built(bytes.fromhex(entry["cubin"]), entry["ptx"], entry["symbols"])


def _write(path: Path, built: Built) -> None:
    """Appears whole or not at all: two processes that build at once replace each other's entry by the same."""
    data = json.dumps({"cubin": built.cubin.hex(), "ptx": built.ptx, "symbols": built.symbols}).encode()
    partial = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as partial:
            partial.write(hashlib.sha256(data).digest() + data)
        os.replace(partial.name, path)
    except OSError as error:
        if partial is not None:
            Path(partial.name).unlink(missing_ok=True)
        warnings.warn(f"{path.parent} cannot keep compiled kernels, each process builds them: {error}", stacklevel=2)


def _build(
    source: str, included: dict[str, str], names: tuple[str, ...], flags: tuple[str, ...], file: str, arch: str
) -> Built:
    what = f"{file} for {arch}"
    texts, paths = ([text.encode() for text in side] for side in (included.values(), included))
    made = nvrtc.nvrtcCreateProgram(source.encode(), file.encode(), len(texts), texts, paths)
    program = _nvrtc(made, what)
    try:
        for name in names:
            _nvrtc(nvrtc.nvrtcAddNameExpression(program, name.encode()), what)
        (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
        if status:
            log = _text(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
            raise CompileFailed(f"{what} does not build ({status.name}):\n{log}")
        size = _nvrtc(nvrtc.nvrtcGetCUBINSize(program), what)
        code = bytearray(size)
        _nvrtc(nvrtc.nvrtcGetCUBIN(program, code), what)
        symbols = {n: _nvrtc(nvrtc.nvrtcGetLoweredName(program, n.encode()), what).decode() for n in names}
        return Built(bytes(code), _text(program, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX), symbols)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _nvrtc(answer: tuple[Any, ...], what: str) -> Any:
    if answer[0]:
        raise CompileFailed(f"{what} does not build: {answer[0].name}")
    return answer[1] if len(answer) > 1 else None


def _text(program: Any, size: Any, fill: Any) -> str:
    text = bytearray(_nvrtc(size(program), "the compiler's answer"))
    _nvrtc(fill(program, text), "the compiler's answer")
    return text.rstrip(b"\0").decode(errors="replace")


@functools.cache
def _compiler() -> list[int]:
    """NVRTC's version."""
    for folder in toolkit.folders("lib"):  # version 13.0 looks for its own other half on the system's path alone
        for half in folder.glob("libnvrtc-builtins.so.*"):
            ctypes.CDLL(str(half))
    try:
        return list(nvrtc.nvrtcVersion()[1:])
    except RuntimeError as error:
        raise ToolMissing(f"NVRTC is not here: pip install 'tilery[cuda]' ({error})") from None
