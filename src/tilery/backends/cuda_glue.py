"""CUDA C++: builds .cu sources into cubins through NVRTC, keeps them on disk, launches them on torch's stream."""

import ctypes
import functools
import hashlib
import json
import os
import tempfile
import threading
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from cuda.bindings import driver, nvrtc

from tilery import device, settings
from tilery.backends import cubin, toolkit
from tilery.errors import CompileFailed, ToolMissing
from tilery.spec import Artifact, TensorSpec

TYPES = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}

_HEADERS = {path.name: path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.cuh"))}
# Line info is for profilers and sanitizers; the code is the same. CUDA 13.0 takes a lambda with `auto` parameters for
# host code unless all code is the device's.
_OPTIONS = ("--std=c++17", "--generate-line-info", "--device-as-default-execution-space")
_EARLY = 90  # the first whose kernels may start while the one before ends
_FORMAT = 1  # of a cache entry
_NO_CONTEXT = driver.CUresult.CUDA_ERROR_INVALID_CONTEXT
_PARAMETERS = {"P": ctypes.c_void_p, "q": ctypes.c_longlong, "i": ctypes.c_int, "f": ctypes.c_float, "T": None}


class Built(NamedTuple):
    cubin: bytes
    ptx: str  # to be read
    symbols: dict[str, str]  # name expression -> the kernel's name in the cubin


class Kernel:
    """One instance of a template in a .cu file, and how it is launched: blocks and threads in one dimension."""

    def __init__(
        self,
        source: Path,
        name: str,
        parameters: str,
        threads: int,
        shared: int = 0,
        cluster: int = 1,
        early: bool = False,
    ) -> None:
        """`parameters`: P pointer, q and i integers of 64 and 32 bits, f float, T a TensorMap by value.

        `shared`: bytes of dynamic memory. `cluster`: neighbouring blocks that run at once and see each other's shared
        memory, from sm_90 on. `early`: there too, blocks may start while the kernel before ends, and call `take_over`.
        """
        self.source, self.name, self.threads, self.shared, self.cluster = source, name, threads, shared, cluster
        self.early = early
        self._local = threading.local()  # .hows: device -> a launch's configuration, of which grid and stream change
        self._types = tuple(_PARAMETERS[letter] for letter in parameters)
        self._functions: dict[int, Any] = {}  # device -> the loaded kernel
        self._resident: dict[int, int] = {}
        self._lock = threading.Lock()

    def build(self, arch: str) -> Built:
        return compile_source(self.source.read_text(encoding="utf-8"), (self.name,), arch, file=self.source.name)

    def compile(self, arch: str) -> Artifact:
        built = self.build(arch)
        if self.early and _can_start_early(arch) and "griddepcontrol.wait" not in built.ptx:
            raise CompileFailed(f"{self.name} starts early, so it must call take_over() before it touches memory")
        used = cubin.resources(built.cubin)
        code = {"cuda": self.source.read_text(encoding="utf-8"), "ptx": built.ptx}
        return Artifact(arch, code, built.cubin, used.registers, used.spills, used.shared + self.shared)

    def launch(self, blocks: int, *values: Any) -> None:
        """On the current device and torch's current stream; builds and loads at the first launch there."""
        index = torch._C._cuda_getDevice()
        function = self._functions.get(index) or self._load(index)
        stream = torch._C._cuda_getCurrentRawStream(index)
        status = self._submit(function, index, blocks, stream, values)
        if status == _NO_CONTEXT:  # this thread's first
            _make_context_current(index)
            status = self._submit(function, index, blocks, stream, values)
        if status:
            _raise(status, f"launching {self.name} with {blocks} blocks of {self.threads} threads")

    def resident(self) -> int:
        """Blocks that run at once on the current device."""
        index = torch._C._cuda_getDevice()
        if index not in self._resident:
            function = self._functions.get(index) or self._load(index)
            asked = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, self.threads, self.shared)
            each = _result(asked, f"asking how many blocks of {self.name} a processor runs")
            self._resident[index] = each * torch.cuda.get_device_properties(index).multi_processor_count
        return self._resident[index]

    def _submit(self, function: Any, index: int, blocks: int, stream: int, values: tuple[Any, ...]) -> Any:
        arguments = values, self._types
        if self.cluster == 1 and not self.early:
            sizes = blocks, 1, 1, self.threads, 1, 1, self.shared
            return driver.cuLaunchKernel(function, *sizes, stream, arguments, 0)[0]
        try:
            how = self._local.hows[index]
        except (AttributeError, KeyError):
            how = self._configured(index)
        how.gridDimX, how.hStream = blocks, stream
        return driver.cuLaunchKernelEx(how, function, arguments, 0)[0]

    def _configured(self, index: int) -> Any:
        """Kept for each thread: to make one takes longer than to launch."""
        how = self._local.__dict__.setdefault("hows", {})[index] = driver.CUlaunchConfig()
        how.gridDimY, how.gridDimZ, how.sharedMemBytes = 1, 1, self.shared
        how.blockDimX, how.blockDimY, how.blockDimZ = self.threads, 1, 1
        early = self.early and _can_start_early(device.arch(torch.device("cuda", index)))
        how.attrs = ([_clusters_of(self.cluster)] if self.cluster > 1 else []) + ([_early()] if early else [])
        how.numAttrs = len(how.attrs)
        return how

    def _load(self, index: int) -> Any:
        """Never unloaded: a captured CUDA graph may hold the kernel longer than we do."""
        with self._lock:
            if index not in self._functions:
                _make_context_current(index)
                built = self.build(device.arch(torch.device("cuda", index)))
                module = _result(driver.cuModuleLoadData(built.cubin), f"loading {self.name}")
                symbol = built.symbols[self.name].encode()
                function = _result(driver.cuModuleGetFunction(module, symbol), f"finding {self.name}")
                if self.shared:
                    most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                    asked = driver.cuFuncSetAttribute(function, most, self.shared)
                    _result(asked, f"giving {self.name} {self.shared} bytes of shared memory")
                self._functions[index] = function
            return self._functions[index]


@functools.cache
def _clusters_of(blocks: int) -> Any:
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    size = attribute.value.clusterDim
    size.x, size.y, size.z = blocks, 1, 1
    return attribute


def _can_start_early(arch: str) -> bool:
    return int(arch.removeprefix("sm_")) >= _EARLY


@functools.cache
def _early() -> Any:
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute


def width(tensors: tuple[Any, ...], *steps: int) -> int:
    """Values per access: 16 bytes of them where all tensors (or specs) and steps keep to 16 bytes, else 1."""
    values = 16 // tensors[0].dtype.itemsize
    for t in tensors:
        if not (t.aligned if isinstance(t, TensorSpec) else t.data_ptr() & 15 == 0):
            return 1
    for step in steps:
        if step % values:
            return 1
    return values


# The driver


def _raise(status: Any, doing: str) -> None:
    (_, text) = driver.cuGetErrorString(status)
    raise RuntimeError(f"CUDA: {doing}: {status.name} ({(text or b'').decode()})")


def _result(answer: tuple[Any, ...], doing: str) -> Any:
    if answer[0]:
        _raise(answer[0], doing)
    return answer[1] if len(answer) > 1 else None


def _make_context_current(index: int) -> None:
    """A thread that has not called the runtime yet has no context, and torch's allocator need not have called it."""
    if not int(_result(driver.cuCtxGetCurrent(), "asking for the context")):
        ordinal = _result(driver.cuDeviceGet(index), f"finding device {index}")
        context = _result(driver.cuDevicePrimaryCtxRetain(ordinal), f"opening device {index}")
        _result(driver.cuCtxSetCurrent(context), f"using device {index}")


# The compiler


def compile_source(
    source: str, names: tuple[str, ...], arch: str, options: tuple[str, ...] = (), file: str = "source.cu"
) -> Built:
    """The instances `names` of a source that may include the .cuh files beside this, from the disk or built now."""
    target = arch + "a" if int(arch.removeprefix("sm_")) >= 90 else arch  # wgmma and its successors are in "a" alone
    flags = (
        f"--gpu-architecture={target}",
        *_OPTIONS,
        *options,
        *(f"--include-path={path}" for path in toolkit.includes()),
    )
    key = hashlib.sha256(json.dumps([_FORMAT, _compiler(), flags, names, _HEADERS, source]).encode()).hexdigest()
    path = settings.get().cache_dir / "cuda" / f"{Path(file).stem}-{arch}-{key[:32]}"
    found = _read(path)
    if found is None:
        found = _build(source, names, flags, file, arch)
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


def _build(source: str, names: tuple[str, ...], flags: tuple[str, ...], file: str, arch: str) -> Built:
    what = f"{file} for {arch}"
    headers, included_as = ([text.encode() for text in side] for side in (_HEADERS.values(), _HEADERS))
    made = nvrtc.nvrtcCreateProgram(source.encode(), file.encode(), len(headers), headers, included_as)
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
