"""Numba-CUDA: a kernel is a Python function, of which Numba makes PTX; cuda.core launches the cubin made of that.

In a `Launch`, `kernel` is a `Kernel`. Tensors are passed as addresses.
"""

import functools
import inspect
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from cuda.bindings import nvjitlink
from cuda.core import LaunchConfig, Linker, LinkerOptions, ObjectCode, Stream
from cuda.core import launch as core_launch
from numba import cuda
from numba.cuda import libdevice
from numba.cuda.types import CPointer, float16, float32, int32, uint16, uint32

from tilery.base.errors import CompileFailed
from tilery.base.launch import Argument, Launch, Values, argument_mismatch, assert_plain, resolver
from tilery.base.spec import Artifact
from tilery.hardware import device, toolkit

# NumPy 2.5 dropped row_stack, an old name of vstack that numba-cuda 0.30 asks for when it first compiles.
if not hasattr(np, "row_stack"):
    np.row_stack = np.vstack

# Addresses and not arrays, so that a launch wraps no tensor. bf16 comes as its bits, since Numba converts it by calls
# into C++ that is compiled apart and linked in.
POINTERS = {torch.float32: CPointer(float32), torch.float16: CPointer(float16), torch.bfloat16: CPointer(uint16)}


# Inlined in Numba's own IR: Numba asks a GPU for its architecture before it compiles a function for another to call.
@cuda.jit(device=True, inline="always")
def _to_float32(value):
    return float32(value)


@cuda.jit(device=True, inline="always")
def _to_float16(value):
    return float16(value)


@cuda.jit(device=True, inline="always")
def _from_bfloat16(bits):
    return libdevice.int_as_float(int32(uint32(bits) << uint32(16)))


@cuda.jit(device=True, inline="always")
def _to_bfloat16(value):
    bits = uint32(libdevice.float_as_int(value))
    rounded = (bits + uint32(0x7FFF) + ((bits >> uint32(16)) & uint32(1))) >> uint32(16)  # to nearest, ties to even
    return uint16(rounded if value == value else uint32(0x7FC0))  # rounding could carry a NaN over to infinity


WIDEN = {torch.float32: _to_float32, torch.float16: _to_float32, torch.bfloat16: _from_bfloat16}
NARROW = {torch.float32: _to_float32, torch.float16: _to_float16, torch.bfloat16: _to_bfloat16}


@dataclass(eq=False)
class Kernel:
    """A function that `cuda.jit` decorates, what it takes and how many threads a block has: enough to compile it."""

    function: Any
    signature: Any
    threads: int


class _Built(NamedTuple):
    symbol: str
    ptx: str
    cubin: bytes


@functools.cache
def _build(kernel: Kernel, arch: str) -> _Built:
    cc = divmod(device.number(arch), 10)
    ptx, _ = cuda.compile_ptx(kernel.function.py_func, kernel.signature, cc=cc, launch_bounds=kernel.threads)
    symbol = re.search(r"\.entry (\w+)", ptx)
    assert symbol, "a kernel's PTX has an entry"
    return _Built(symbol[1], ptx, _assemble(ptx, arch))


def _assemble(ptx: str, arch: str) -> bytes:
    """By nvJitLink, as Numba does; by ptxas where torch pins an nvJitLink older than the NVVM that wrote the PTX."""
    release = re.search(r"release (\d+)\.(\d+)", ptx)
    if release is None or nvjitlink.version() >= (int(release[1]), int(release[2])):
        linker = Linker(ObjectCode.from_ptx(ptx.encode()), options=LinkerOptions(arch=arch))
        return bytes(linker.link("cubin").code)
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx, encoding="utf-8")
        command = [str(toolkit.find("ptxas")), f"-arch={arch}", str(source), "-o", str(target)]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
        if done.returncode:
            raise CompileFailed(f"{command[0]} for {arch}: {done.stderr}{done.stdout}")
        return target.read_bytes()


def compile(launch: Launch, arch: str) -> Artifact:
    built = _build(launch.kernel, arch)
    used = toolkit.resources(built.cubin)
    return Artifact(arch, {"ptx": built.ptx}, built.cubin, used.registers, used.spills, used.shared)


@functools.cache
def _loaded(kernel: Kernel, index: int) -> Any:
    built = _build(kernel, device.arch(torch.device("cuda", index)))
    return ObjectCode.from_cubin(built.cubin).get_kernel(built.symbol)


_stream = functools.cache(Stream.from_handle)


@functools.lru_cache(1024)
def _shape(grid: int, threads: int) -> LaunchConfig:
    return LaunchConfig(grid=grid, block=threads)


def bind(launch: Launch, where: torch.device) -> Callable[[Values], None]:
    """What runs the launch for a call's values, on torch's current stream.

    An int is passed as 64 bits, so as an address too, and a float as a double.
    """
    assert_plain(launch)
    kernel, names = launch.kernel, tuple(inspect.signature(launch.kernel.function.py_func).parameters)
    assert not (wrong := argument_mismatch(kernel.function.__name__, names, launch.args)), wrong
    assert isinstance(launch.grid, int), "a grid of Numba's is one number"
    shape = _shape(launch.grid, kernel.threads)
    resolved = resolver(tuple(launch.args[name] for name in names), _of_tensor)
    current_device, current_stream = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream

    def run(values: Values) -> None:
        index = current_device()
        core_launch(_stream(current_stream(index)), shape, _loaded(kernel, index), *resolved(values))

    return run


def _of_tensor(x: Argument) -> Callable[[Values], Any]:
    return x.address
