"""Triton and Gluon: compiles a kernel from specs for an architecture that need not be present."""

import os
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import create_function_from_signature
from triton.tools import tensor_descriptor

from tilery.backends import cubin
from tilery.errors import CompileFailed
from tilery.spec import Artifact, TensorSpec

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
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    launched = [_stand_in(value) for value in arguments]
    bound, specialization, _ = bind(*launched, **constants, **options)
    # Triton's own way from arguments to a source: a launch finds in its cache what is compiled here.
    made = kernel._pack_args(backend, dict(options), bound, specialization, options)
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, *made[1:])
    built = triton.compile(source, target=target, options=made[0].__dict__)
    used = cubin.resources(built.asm["cubin"])
    code = {"ir": built.asm["ttgir"], "ptx": built.asm["ptx"]}
    return Artifact(arch, code, built.asm["cubin"], used.registers, used.spills, built.metadata.shared)


def greediest(made: list[Artifact]) -> Artifact:
    """Of the kernels that one op launches, the one that takes most of a processor: the others fit where it does."""
    return max(made, key=lambda a: (a.spills or 0, a.registers or 0))
