"""CuPy: a kernel is a CUDA C++ template in a string, of which NVRTC makes a cubin, to look at or to launch.

In a `Launch`, `kernel` is a `Template`, `constants` are the template's parameters and `options["threads"]` says how
many threads a block has. Tensors are passed as addresses.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import cupy
import torch
from cupy._core.core import assemble_cupy_compiler_options
from cupy.cuda import nvrtc

from tilery.base.errors import CompileFailed
from tilery.base.launch import Argument, Launch, Values, assert_plain, resolver
from tilery.base.spec import Artifact
from tilery.hardware import device, toolkit
from tilery.languages import cuda_signature

TYPES = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}


class Template(NamedTuple):
    """A kernel in a source string."""

    source: str
    name: str


class _Built(NamedTuple):
    symbol: str  # the mangled name
    ptx: str
    cubin: bytes


@functools.cache
def _build(source: str, name: str, arch: str) -> _Built:
    """`name` is an instance of the template. Not by RawKernel: that asks a driver which architecture to build for."""
    options = assemble_cupy_compiler_options((f"-arch={arch}",))  # adds where cuda_fp16.h and cuda_bf16.h are
    program = nvrtc.createProgram(source, "kernel.cu", (), ())
    try:
        nvrtc.addNameExpression(program, name)
        nvrtc.compileProgram(program, options)
        binary = nvrtc.getCUBIN(program) + b"\0"  # CuPy takes the last byte for the end of a string and drops it
        return _Built(nvrtc.getLoweredName(program, name), nvrtc.getPTX(program).decode(), binary)
    except nvrtc.NVRTCError as error:
        raise CompileFailed(f"{name} for {arch}: {error}\n{nvrtc.getProgramLog(program)}") from None
    finally:
        nvrtc.destroyProgram(program)


def compile(launch: Launch, arch: str) -> Artifact:
    source = launch.kernel.source
    built = _build(source, _instance(launch), arch)
    used = toolkit.resources(built.cubin)
    return Artifact(arch, {"cuda": source, "ptx": built.ptx}, built.cubin, used.registers, used.spills, used.shared)


def _instance(launch: Launch) -> str:
    constants = {name: TYPES.get(value, value) for name, value in launch.constants.items()}
    return cuda_signature.find(launch.kernel.source, launch.kernel.name).instance(constants)


def bind(launch: Launch, where: torch.device) -> Callable[[Values], None]:
    """What runs the launch for a call's values, on torch's current stream.

    CuPy passes an int as 64 bits, so as an address too, and a float as a double.
    """
    assert_plain(launch)
    signature = cuda_signature.find(launch.kernel.source, launch.kernel.name)
    source, name = launch.kernel.source, _instance(launch)
    grid, threads = (launch.grid,), (launch.options["threads"],)
    resolved = resolver(signature.ordered(launch.args), _of_tensor)
    current_device, current_stream = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream

    def run(values: Values) -> None:
        index = current_device()
        stream = _stream(current_stream(index))
        _function(source, name, index)(grid, threads, tuple(resolved(values)), stream=stream)

    return run


def _of_tensor(x: Argument) -> Callable[[Values], Any]:
    return x.address


@functools.cache
def _function(source: str, name: str, index: int) -> Any:
    """The kernel, loaded on the current device, which is `index`."""
    built = _build(source, name, device.arch(torch.device("cuda", index)))
    module = cupy.cuda.Module()
    module.load(built.cubin)
    return module.get_function(built.symbol)


@functools.cache
def _stream(handle: int) -> Any:
    """torch's current stream, which is `handle`, as CuPy's."""
    return cupy.cuda.Stream.from_external(torch.cuda.current_stream())
