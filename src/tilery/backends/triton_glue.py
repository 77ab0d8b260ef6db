"""Triton and Gluon: compiles a kernel from specs for an architecture that need not be present."""

import os
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from tilery.backends import cubin
from tilery.errors import CompileFailed
from tilery.spec import Artifact, TensorSpec

_POINTER = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int32: "*i32", torch.int64: "*i64",
    torch.uint8: "*u8",
}  # fmt: skip
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton reads it when a kernel is decorated


def interpreter_refusal(specs: tuple[Any, ...]) -> str | None:
    """Triton takes CPU tensors in its interpreter, which computes bf16 wrongly without saying so."""
    if not _INTERPRETED:
        return "needs a CUDA tensor, or for a CPU one its interpreter: set TRITON_INTERPRET=1 before Python starts"
    # A scalar "bf16" is the dtype of an output.
    if any(s.dtype == torch.bfloat16 if isinstance(s, TensorSpec) else s == "bf16" for s in specs):
        return "Triton's interpreter multiplies the raw bits of bf16; use fp16 or fp32 there, or a GPU"
    return None


class Descriptor(NamedTuple):
    """A tensor descriptor in a compile: what a launch would build from a tensor."""

    spec: TensorSpec
    block: tuple[int, ...]
    layout: Any  # Gluon's shared layout


def compile(
    kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any], options: dict[str, Any], arch: str
) -> Artifact:
    """Specializes as a launch would: on what is None, 16-byte pointers, integers that are 1 or multiples of 16."""
    if not isinstance(kernel, triton.JITFunction):
        raise CompileFailed(
            "TRITON_INTERPRET=1 replaced this kernel by its interpreter: compile in a process without it"
        )
    signature, constants, attrs = dict.fromkeys(constants, "constexpr"), dict(constants), {}
    for i, (name, value) in enumerate(zip(kernel.arg_names, arguments)):
        if isinstance(value, TensorSpec):
            signature[name], divisible = _POINTER[value.dtype], value.aligned
        elif isinstance(value, Descriptor):
            element = _POINTER[value.spec.dtype].removeprefix("*")
            signature[name], divisible = f"tensordesc<{element}{list(value.block)},{value.layout!r}>", False
        elif isinstance(value, float):
            signature[name], divisible = "fp32", False
        elif value is None:
            signature[name], constants[name], divisible = "constexpr", None, False
        elif kernel.params[i].do_not_specialize:
            signature[name], divisible = "i32" if value < 2**31 else "i64", False
        elif value == 1:
            signature[name], constants[name], divisible = "constexpr", 1, False
        else:
            signature[name], divisible = "i32" if value < 2**31 else "i64", value % 16 == 0
        if divisible:
            attrs[(i,)] = [["tt.divisibility", 16]]
    signature = {name: signature[name] for name in kernel.arg_names}  # Triton reads it by position
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constants, attrs)
    built = triton.compile(source, target=GPUTarget("cuda", int(arch.removeprefix("sm_")), 32), options=options)
    used = cubin.resources(built.asm["cubin"])
    code = {"ir": built.asm["ttgir"], "ptx": built.asm["ptx"]}
    return Artifact(arch, code, built.asm["cubin"], used.registers, used.spills, built.metadata.shared)


def greediest(made: list[Artifact]) -> Artifact:
    """Of the kernels that one op launches, the one that takes most of a processor: the others fit where it does."""
    return max(made, key=lambda a: (a.spills or 0, a.registers or 0))
