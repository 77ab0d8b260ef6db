"""Triton and Gluon: compiles a kernel from specs for an architecture that need not be present."""

import functools
import os
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc
from triton.runtime.jit import create_function_from_signature
from triton.tools import tensor_descriptor

from tilery import device
from tilery.backends import cubin
from tilery.errors import CompileFailed
from tilery.spec import Artifact, TensorSpec

_EARLY = 90  # the first whose kernels may start while the one before ends
_FEW = 264  # programs: two for each processor of an H200
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton reads it when a kernel is decorated


def interpreter_refusal(specs: tuple[Any, ...]) -> str | None:
    """Triton takes CPU tensors in its interpreter, which computes bf16 wrongly without saying so."""
    if not _INTERPRETED:
        return "needs a CUDA tensor, or for a CPU one its interpreter: set TRITON_INTERPRET=1 before Python starts"
    # A scalar "bf16" is the dtype of an output.
    if any(s.dtype == torch.bfloat16 if isinstance(s, TensorSpec) else s == "bf16" for s in specs):
        return "Triton's interpreter multiplies the raw bits of bf16; use fp16 or fp32 there, or a GPU"
    return None


class _Pointer:
    """What Triton asks of a tensor before a launch."""

    def __init__(self, spec: TensorSpec) -> None:
        self.dtype, self._address = spec.dtype, 0 if spec.aligned else spec.dtype.itemsize

    def data_ptr(self) -> int:
        return self._address


def _stand_in(value: Any) -> Any:
    if isinstance(value, TensorSpec):
        return _Pointer(value)
    if isinstance(value, Descriptor):
        one = TensorSpec.contiguous(value.block, value.spec.dtype, value.spec.device)  # its sizes decide no code
        if value.layout is None:
            return tensor_descriptor.TensorDescriptor(
                _Pointer(one), list(one.shape), list(one.strides), list(one.shape)
            )
        return TensorDescriptor(_Pointer(one), list(one.shape), list(one.strides), list(one.shape), value.layout)
    return value


class Descriptor(NamedTuple):
    """A tensor descriptor in a compile: what a launch would build from a tensor."""

    spec: TensorSpec
    block: tuple[int, ...]
    layout: Any  # Gluon's shared layout; None for Triton, which chooses one


def early(kernel: Any) -> Any:
    """Marks a kernel whose programs may start while the kernel before ends, and call `take_over`."""
    kernel.early = True
    return kernel


def _in_early(emit: Any) -> Any:
    """What a kernel calls while it is compiled: it emits code where the kernel is launched early.

    Not on older devices, nor in the interpreter, which gives no semantic.
    """

    def emitted(*arguments: Any, _semantic: Any = None) -> None:
        if _semantic is not None and _semantic.builder.options.launch_pdl:
            emit(*arguments, _semantic)

    emitted.__triton_builtin__ = True  # type: ignore[attr-defined]
    return emitted


@_in_early
def _wait(semantic: Any) -> None:
    gdc.gdc_wait(_semantic=semantic)


@_in_early
def _let_next(condition: Any, semantic: Any) -> None:
    """`condition`: PTX that sets `yes`, with x and y to work with."""
    said = f"{{ .reg .pred yes; .reg .u32 x, y; {condition.value} @yes griddepcontrol.launch_dependents; }} // $0"
    tl.inline_asm_elementwise(said, "=r", [], dtype=tl.int32, is_pure=False, pack=1, _semantic=semantic)


# Constants of JIT functions: what is emitted is part of the key of Triton's cache.
_PROGRAMS = "mov.u32 x, %nctaid.x; mov.u32 y, %nctaid.y; mul.lo.u32 x, x, y; mov.u32 y, %nctaid.z; mul.lo.u32 x, x, y;"
_FEW_PROGRAMS = tl.constexpr(f"{_PROGRAMS} setp.le.u32 yes, x, {_FEW};")
_LARGE_PROGRAMS = tl.constexpr("mov.u32 x, %ntid.x; setp.ge.u32 yes, x, 128;")


@triton.jit
def take_over():
    """In a kernel, before it touches what one before may have written or may read: waits until all of that has ended.

    The next kernel may start now if this one's programs are few. Of many, the next one's would be spread unevenly,
    where these leave room: add_rms_norm of 512 × 4096 took 6.6 µs so on an H200, 5.6 with `hand_over` after its loads.
    silu_mul of 16 × 14336 took 1.5 so, 1.7 with `hand_over` alone. Before the wait, programs of many kernels would pile
    up.
    """
    _wait()
    _let_next(_FEW_PROGRAMS)


@triton.jit
def hand_over():
    """In a kernel, where all is read, or at once if there is little to do: the next one may start.

    It may at the latest when all programs of this one have ended. Small programs do not say it, which would cost more
    than it saves: softmax of 32768 × 1024 took 40 µs on an H200, 33.5 without.
    """
    _let_next(_LARGE_PROGRAMS)


def launch(
    kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any], options: dict[str, Any]
) -> None:
    """On the current device, which is the first argument's, and its stream; early if the kernel is marked so."""
    if not _INTERPRETED and getattr(kernel, "early", False) and _starts_early(arguments[0].device):
        options = options | {"launch_pdl": True}
    kernel[grid](*arguments, **constants, **options)


@functools.cache
def _starts_early(where: torch.device) -> bool:
    return int(device.arch(where).removeprefix("sm_")) >= _EARLY


def compile(
    kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any], options: dict[str, Any], arch: str
) -> Artifact:
    """Specializes as a launch would: on what is None, 16-byte pointers, integers that are 1 or multiples of 16."""
    if not isinstance(kernel, triton.JITFunction):
        raise CompileFailed(
            "TRITON_INTERPRET=1 replaced this kernel by its interpreter: compile in a process without it"
        )
    target = GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    backend = make_backend(target)
    if is_early := target.arch >= _EARLY and getattr(kernel, "early", False):
        options = options | {"launch_pdl": True}
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    launched = [_stand_in(value) for value in arguments]
    bound, specialization, _ = bind(*launched, **constants, **options)
    # Triton's own way from arguments to a source: a launch finds in its cache what is compiled here.
    made = kernel._pack_args(backend, dict(options), bound, specialization, options)
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, *made[1:])
    built = triton.compile(source, target=target, options=made[0].__dict__)
    if is_early and "griddepcontrol.wait" not in built.asm["ptx"]:
        raise CompileFailed(f"{kernel} is marked to start early, so it must call take_over() before it touches memory")
    used = cubin.resources(built.asm["cubin"])
    code = {"ir": built.asm["ttgir"], "ptx": built.asm["ptx"]}
    return Artifact(arch, code, built.asm["cubin"], used.registers, used.spills, built.metadata.shared)


def greediest(made: list[Artifact]) -> Artifact:
    """Of the kernels that one op launches, the one that takes most of a processor: the others fit where it does."""
    return max(made, key=lambda a: (a.spills or 0, a.registers or 0))
