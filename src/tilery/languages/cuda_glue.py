"""CUDA C++: compile a launch through NVRTC for an architecture that need not be present, and run it on torch's stream.

In a `Launch`, `kernel` is a `Source`, `constants` are the parameters of its template and `options` has `threads` (of a
block) and `shared` (bytes of dynamic shared memory). Which arguments it takes is read from the source. Tensors are
passed as addresses, or as tensor maps (`tensor_maps.TensorMapOf`) for TMA.
"""

import ctypes
import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver

from tilery.base import settings
from tilery.base.errors import CompileFailed
from tilery.base.launch import Argument, Launch, Persistent, Values, resolver
from tilery.base.spec import Artifact
from tilery.hardware import device, toolkit
from tilery.hardware.gpu import PDL
from tilery.languages import cuda_emulator, cuda_signature
from tilery.languages.cuda_compiler import Built, compile_source, headers
from tilery.languages.cuda_signature import TENSOR_MAP, Signature, Struct
from tilery.languages.cuda_source import Source

TYPES = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}

_NO_CONTEXT = driver.CUresult.CUDA_ERROR_INVALID_CONTEXT


def signature_of(source: Source) -> Signature:
    """Which constants and arguments the kernel takes, read from its text."""
    return cuda_signature.find(source.text, source.name, "".join(headers(source.path.parent).values()))


def interpreter_refusal(specs: tuple[Any, ...]) -> str | None:
    """CPU tensors are taken by the emulator alone, and only if that is asked for: it is for tests."""
    if not settings.get().emulate:
        return "needs a CUDA tensor, or for a CPU one the emulator: set TILERY_EMULATE=1"
    return cuda_emulator.refusal()


def bind(launch: Launch, where: torch.device) -> Callable[[Values], None]:
    """What runs the launch for a call's values, on the current device and torch's current stream."""
    signature = signature_of(launch.kernel)
    arguments = tuple(
        _Packed(p.type.layout, value) if isinstance(p.type, Struct) else value
        for p, value in zip(signature.parameters, signature.ordered(launch.args))
    )
    if where.type == "cpu" and settings.get().emulate:
        return cuda_emulator.bind(launch, signature, _instance_of(launch, signature), arguments)
    kernel, resolved = _kernel_of(launch), resolver(arguments, _of_tensor)
    blocks = launch.grid
    if isinstance(blocks, Persistent):
        blocks = min(blocks.most, kernel.resident() // launch.cluster * launch.cluster)
    assert isinstance(blocks, int), "a grid of CUDA kernels here is one number"
    return lambda values: kernel.launch(blocks, *resolved(values))


def compile(launch: Launch, arch: str) -> Artifact:
    return _kernel_of(launch).compile(arch)


def _kernel_of(launch: Launch) -> "Kernel":
    source, signature = launch.kernel, signature_of(launch.kernel)
    types = tuple(None if isinstance(p.type, Struct) or p.type == TENSOR_MAP else p.type for p in signature.parameters)
    options = launch.options["threads"], launch.options.get("shared", 0), launch.cluster, launch.pdl
    return _kernel(source.path, _instance_of(launch, signature), types, *options)


def _instance_of(launch: Launch, signature: Signature) -> str:
    return signature.instance({name: TYPES.get(value, value) for name, value in launch.constants.items()})


@functools.lru_cache(maxsize=4096)
def _kernel(*how: Any) -> "Kernel":
    return Kernel(*how)


def _of_tensor(x: Argument) -> Callable[[Values], Any]:
    return x.address


class _Packed:
    """The fields of a struct, as an argument of a launch."""

    def __init__(self, layout: type[ctypes.Structure], fields: tuple[Any, ...]) -> None:
        self._layout, self._resolved = layout, resolver(fields, _of_tensor)

    def bound(self, values: Values) -> "_Struct":
        return _Struct(self._layout(*self._resolved(values)))


class _Struct:
    """Memory with a struct, as cuda.bindings takes an argument whose type it does not know."""

    def __init__(self, made: ctypes.Structure) -> None:
        self._made = made

    def getPtr(self) -> int:  # noqa: N802  the name that cuda.bindings asks for
        return ctypes.addressof(self._made)


class Kernel:
    """One instance of a template in a .cu file, and how it is launched: blocks and threads in one dimension."""

    def __init__(
        self, source: Path, name: str, types: tuple[Any, ...],
        threads: int, shared: int = 0, cluster: int = 1, pdl: bool = False,
    ) -> None:  # fmt: skip
        """`types`: of the parameters, as ctypes has them; None for what is passed by value: structs, tensor maps.

        `shared`: bytes of dynamic memory. `cluster`: neighbouring blocks that run at once and see each other's shared
        memory, from sm_90 on. `pdl`: there too, blocks may start before the last kernel ends; they call `pdl_wait`.
        """
        self.source, self.name, self.threads, self.shared, self.cluster = source, name, threads, shared, cluster
        self.pdl = pdl
        self._local = threading.local()  # .hows: device -> a launch's configuration, of which grid and stream change
        self._types = types
        self._functions: dict[int, Any] = {}  # device -> the loaded kernel
        self._resident: dict[int, int] = {}
        self._lock = threading.Lock()

    def build(self, arch: str) -> Built:
        text, folder = self.source.read_text(encoding="utf-8"), self.source.parent
        return compile_source(text, (self.name,), arch, file=self.source.name, folder=folder)

    def compile(self, arch: str) -> Artifact:
        built = self.build(arch)
        if self.pdl and _has_pdl(arch) and "griddepcontrol.wait" not in built.ptx:
            raise CompileFailed(f"{self.name} has pdl=True, so it must call pdl_wait() before it touches memory")
        used = toolkit.resources(built.cubin)
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
        """Blocks that run at once on the current device, in whole clusters."""
        index = torch._C._cuda_getDevice()
        if index not in self._resident:
            function = self._functions.get(index) or self._load(index)
            if self.cluster > 1:  # some SMs of a GPC may fill no cluster
                how = self._configured(index)
                how.gridDimX = self.cluster
                asked = driver.cuOccupancyMaxActiveClusters(function, how)
                self._resident[index] = self.cluster * _result(asked, f"asking how many clusters of {self.name} run")
            else:
                asked = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, self.threads, self.shared)
                each = _result(asked, f"asking how many blocks of {self.name} an SM runs")
                self._resident[index] = each * torch.cuda.get_device_properties(index).multi_processor_count
        return self._resident[index]

    def _submit(self, function: Any, index: int, blocks: int, stream: int, values: tuple[Any, ...]) -> Any:
        arguments = values, self._types
        if self.cluster == 1 and not self.pdl:
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
        pdl = self.pdl and _has_pdl(device.arch(torch.device("cuda", index)))
        how.attrs = ([_clusters_of(self.cluster)] if self.cluster > 1 else []) + ([_pdl_attribute()] if pdl else [])
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


def _has_pdl(arch: str) -> bool:
    return device.number(arch) >= PDL


@functools.cache
def _pdl_attribute() -> Any:
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute


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
