"""TileLang: lower a launch to CUDA C++ and make a cubin of it without a GPU; on one, run TileLang's own build.

In a `Launch`, `kernel` is a function that makes the prim_func for `constants`, and `args` are its parameters. The
prim_func has its grid. Tensors are passed as tensors, whose shapes and strides TileLang checks.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

import tilelang
import torch
from tilelang import tvm
from tilelang.contrib import nvcc
from tilelang.env import CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH

from tilery import languages
from tilery.base.launch import Argument, Launch, Values, assert_plain, resolver
from tilery.base.spec import Artifact
from tilery.hardware import device, toolkit

NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}

logging.getLogger("tilelang.jit.kernel").setLevel(logging.WARNING)  # its INFO goes to stdout, among a program's results


def compile(launch: Launch, arch: str) -> Artifact:
    return _compiled(launch.kernel, dict(launch.constants), arch)


def _compiled(build: Callable[..., Any], constants: dict[str, Any], arch: str) -> Artifact:
    function, target = build(**constants), _target(arch)
    with tvm.transform.PassContext(opt_level=3), target:  # as tilelang.compile has them
        lowered = tilelang.lower(function, target=target)
    binary = _cubin(lowered.kernel_source, _exact(arch))
    used = toolkit.resources(binary)
    dynamic = sum(int(f.attrs.get("dyn_shared_memory_buf", 0)) for f in lowered.device_mod.functions.values())
    code = {"ir": function.script(), "cuda": lowered.kernel_source}
    return Artifact(arch, code, binary, used.registers, used.spills, used.shared + dynamic)


def bind(launch: Launch, where: torch.device) -> Callable[[Values], None]:
    """What runs the launch for a call's values, on the current stream of its tensors' device: tvm-ffi asks torch."""
    assert_plain(launch)
    constants = tuple(launch.constants.items())
    resolved = resolver(tuple(launch.args.values()), _of_tensor)
    build, order, present = launch.kernel, tuple(launch.args), _present(where.index or 0)
    entry: Any = None  # compiled at the first call, and kept with the plan

    def run(values: Values) -> None:
        nonlocal entry
        entry = entry or _loaded(build, constants, order, present)
        entry(*resolved(values))

    return run


def _of_tensor(x: Argument) -> Callable[[Values], Any]:
    return x.tensor


@functools.cache
def _present(index: int) -> str:
    return device.arch(torch.device("cuda", index))


@functools.lru_cache(maxsize=512)
def _loaded(
    build: Callable[..., Any], constants: tuple[tuple[str, Any], ...], order: tuple[str, ...], arch: str
) -> Any:
    """The kernel's entry: it checks the tensors' shapes and strides, then launches on whichever device they are.

    `order`: the names of the arguments as they will be passed.
    """
    function = build(**dict(constants))
    names = tuple(
        str(function.buffer_map[p].name) if p in function.buffer_map else str(p.name) for p in function.params
    )
    assert order == names, f"{build.__name__} takes {', '.join(names)}, the launch has {', '.join(order)}"
    kernel = tilelang.compile(function, target=_target(arch), execution_backend="tvm_ffi")
    return kernel.adapter.get_exportable_executable()["main"]  # not kernel(...): that sorts the arguments in Python


def _exact(arch: str) -> str:
    """sm_90a for sm_90: wgmma and TMA are for the exact architecture."""
    return f"sm_{nvcc.get_target_arch(divmod(device.number(arch), 10))}"


def _target(arch: str) -> Any:
    return tvm.target.Target({"kind": "cuda", "arch": _exact(arch)})


def _cubin(source: str, exact: str) -> bytes:
    """Through NVRTC, which needs no host compiler; through nvcc where cuda.core or CUDA's own headers are missing."""
    headers = toolkit.includes()
    if len(headers) < 2 or not languages.installed("cuda.core"):
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
