"""TileLang: lowers a kernel to CUDA C++ and makes a cubin of it without a GPU; on one, launches TileLang's build."""

import functools
import logging
from collections.abc import Callable
from typing import Any

import tilelang
import torch
from tilelang import tvm
from tilelang.contrib import nvcc
from tilelang.env import CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH

from tilery import backends, device
from tilery.backends import cubin, toolkit
from tilery.spec import Artifact

NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}

logging.getLogger("tilelang.jit.kernel").setLevel(logging.WARNING)  # its INFO goes to stdout, among a program's results


def compile(build: Callable[..., Any], constants: tuple[Any, ...], arch: str) -> Artifact:
    """`build` makes the kernel for these constants."""
    function, target = build(*constants), _target(arch)
    with tvm.transform.PassContext(opt_level=3), target:  # as tilelang.compile has them
        lowered = tilelang.lower(function, target=target)
    binary = _cubin(lowered.kernel_source, _exact(arch))
    used = cubin.resources(binary)
    dynamic = sum(int(f.attrs.get("dyn_shared_memory_buf", 0)) for f in lowered.device_mod.functions.values())
    code = {"ir": function.script(), "cuda": lowered.kernel_source}
    return Artifact(arch, code, binary, used.registers, used.spills, used.shared + dynamic)


def launch(build: Callable[..., Any], constants: tuple[Any, ...], arguments: tuple[Any, ...]) -> None:
    """On the current stream of the tensors' device: tvm-ffi asks torch for it at every call."""
    _loaded(build, constants, _present(torch._C._cuda_getDevice()))(*arguments)


@functools.cache
def _present(index: int) -> str:
    return device.arch(torch.device("cuda", index))


@functools.lru_cache(maxsize=512)
def _loaded(build: Callable[..., Any], constants: tuple[Any, ...], arch: str) -> Any:
    """The kernel's entry: it checks the tensors' shapes and strides, then launches on whichever device they are."""
    kernel = tilelang.compile(build(*constants), target=_target(arch), execution_backend="tvm_ffi")
    return kernel.adapter.get_exportable_executable()["main"]  # not kernel(...): that sorts the arguments in Python


def _exact(arch: str) -> str:
    """sm_90a for sm_90: wgmma and TMA are for the exact architecture."""
    return f"sm_{nvcc.get_target_arch(divmod(int(arch.removeprefix('sm_')), 10))}"


def _target(arch: str) -> Any:
    return tvm.target.Target({"kind": "cuda", "arch": _exact(arch)})


def _cubin(source: str, exact: str) -> bytes:
    """Through NVRTC, which needs no host compiler; through nvcc where cuda.core or CUDA's own headers are missing."""
    headers = toolkit.includes()
    if len(headers) < 2 or not backends.installed("cuda.core"):
        return bytes(nvcc.compile_cuda(source, "cubin", [f"-arch={exact}"], nvcc.default_compile_options()))
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(
        arch=exact,
        std="c++20",
        device_as_default_execution_space=True,
        include_path=[TILELANG_TEMPLATE_PATH, CUTLASS_INCLUDE_DIR, *headers],
    )
    source = f"#include <tl_templates/cuda/nvrtc_std.h>\n{source}"  # stands in for the host's <cstdint>
    return Program(source, "c++", options).compile("cubin").code
