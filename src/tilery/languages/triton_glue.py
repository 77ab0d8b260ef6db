"""Triton and Gluon: compile a launch for an architecture that need not be present, and run it on torch's stream.

In a `Launch`, `kernel` is a JIT function, `constants` its constexpr parameters and `options` what Triton's compiler
takes (num_warps, num_stages …). Tensors are passed as pointers; a tuple, named or not, is a group of arguments. A
constant may be a `Scalar`, whose few values have code of their own each.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc
from triton.runtime.jit import create_function_from_signature
from triton.tools import tensor_descriptor

from tilery.base.errors import CompileFailed
from tilery.base.launch import Argument, Launch, Scalar, Values, argument_mismatch, resolver
from tilery.base.spec import Artifact, TensorSpec
from tilery.hardware import device, toolkit
from tilery.hardware.gpu import PDL
from tilery.hardware.machine_code import unset_registers

_MISCOMPILED = "sm_90"  # by ptxas 12.8, in some kernels
_LEAST_FP32 = 2.0**-126
_FEW = 264  # programs: two for each SM of an H200
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton reads it when a kernel is decorated


def interpreter_refusal(specs: tuple[Any, ...]) -> str | None:
    """Triton takes CPU tensors in its interpreter, which computes bf16 wrongly without saying so."""
    if not _INTERPRETED:
        return "needs a CUDA tensor, or for a CPU one its interpreter: set TRITON_INTERPRET=1 before Python starts"
    # A scalar "bf16" is the dtype of an output.
    if any(s.dtype == torch.bfloat16 if isinstance(s, TensorSpec) else s == "bf16" for s in specs):
        return "Triton's interpreter multiplies the raw bits of bf16; use fp16 or fp32 there, or a GPU"
    return None


# Programmatic dependent launch, in kernels


def _where_launched_so(emit: Any) -> Any:
    """What a kernel calls while it is compiled: it emits code where the launch is a dependent one.

    Not on older devices, nor in the interpreter, which gives no semantic.
    """

    def emitted(*arguments: Any, _semantic: Any = None) -> None:
        if _semantic is not None and _semantic.builder.options.launch_pdl:
            emit(*arguments, _semantic)

    emitted.__triton_builtin__ = True  # type: ignore[attr-defined]
    return emitted


@_where_launched_so
def _griddepcontrol_wait(semantic: Any) -> None:
    gdc.gdc_wait(_semantic=semantic)


@_where_launched_so
def _launch_dependents_if(condition: Any, semantic: Any) -> None:
    """`condition`: PTX that sets `yes`, with x and y to work with."""
    said = f"{{ .reg .pred yes; .reg .u32 x, y; {condition.value} @yes griddepcontrol.launch_dependents; }} // $0"
    tl.inline_asm_elementwise(said, "=r", [], dtype=tl.int32, is_pure=False, pack=1, _semantic=semantic)


# Constants of JIT functions: what is emitted is part of the key of Triton's cache.
_PROGRAMS = "mov.u32 x, %nctaid.x; mov.u32 y, %nctaid.y; mul.lo.u32 x, x, y; mov.u32 y, %nctaid.z; mul.lo.u32 x, x, y;"
_FEW_PROGRAMS = tl.constexpr(f"{_PROGRAMS} setp.le.u32 yes, x, {_FEW};")
_LARGE_PROGRAMS = tl.constexpr("mov.u32 x, %ntid.x; setp.ge.u32 yes, x, 128;")


@triton.jit
def pdl_wait():
    """griddepcontrol.wait: before a kernel touches what one before may have written or may read.

    In a small grid, launch_dependents comes right after it. In a large one the next kernel's programs would be spread
    unevenly, where these leave room: add_rms_norm of 512 × 4096 took 6.6 µs so on an H200, and 5.6 with
    `pdl_launch_dependents` after its loads. silu_mul of 16 × 14336 took 1.5 so, and 1.7 with that alone. Before the
    wait, programs of many kernels would pile up.
    """
    _griddepcontrol_wait()
    _launch_dependents_if(_FEW_PROGRAMS)


@triton.jit
def pdl_launch_dependents():
    """launch_dependents: where all is read, or at once if there is little to do. The next kernel may start.

    It may at the latest when all programs of this one have ended. Small programs do not say it, which would cost more
    than it saves: softmax of 32768 × 1024 took 40 µs on an H200, 33.5 without.
    """
    _launch_dependents_if(_LARGE_PROGRAMS)


# Lengths and strides, in kernels


def vector_of(x: TensorSpec, *steps: int) -> int:
    """Values of an access of 16 bytes, where a kernel must be told that they divide all these lengths and strides.

    Triton asks by itself whether 16 divides an integer. Of a length of 3000, which only 8 divides, it would know
    nothing, and move two bytes of bf16 at a time. 1 where it needs no help, or where there is none.
    """
    values = 16 // x.dtype.itemsize
    needed = any(step % 16 for step in steps) and all(step % values == 0 for step in steps)
    return values if needed else 1


@triton.jit
def multiple(value, VECTOR: tl.constexpr):
    """The value, which VECTOR divides: the compiler sees that so, and of an argument not from `tl.multiple_of`."""
    if VECTOR > 1:
        return value // VECTOR * VECTOR
    return value


# Arguments


@dataclass(frozen=True)
class Descriptor:
    """A TMA descriptor of a matrix, as an argument of a launch."""

    matrix: Argument  # [rows, columns], columns contiguous
    block: tuple[int, ...]
    layout: Any = None  # Gluon's shared layout; None for Triton, which chooses one

    def bound(self, values: Values) -> Any:
        x = self.matrix.tensor(values).detach()
        return self._of(x, list(x.shape), list(x.stride()))

    @property
    def stand_in(self) -> Any:
        """What a compiler is given; the sizes of the matrix decide no code."""
        one = TensorSpec.contiguous(self.block, self.matrix.dtype, self.matrix.device)
        return self._of(_Pointer(one.dtype, 0), list(one.shape), list(one.strides))

    def _of(self, x: Any, shape: list[int], strides: list[int]) -> Any:
        if self.layout is None:
            return tensor_descriptor.TensorDescriptor(x, shape, strides, list(self.block))
        return TensorDescriptor(x, shape, strides, list(self.block), self.layout)


class _Pointer:
    """What Triton asks of a tensor before a launch."""

    __slots__ = ("_address", "dtype")

    def __init__(self, dtype: torch.dtype, address: int) -> None:
        self.dtype, self._address = dtype, address

    def data_ptr(self) -> int:
        return self._address


def _stand_in(value: Any) -> Any:
    """What a compiler is given for an argument: it looks at dtypes, alignment and numbers."""
    if isinstance(value, TensorSpec):
        return _Pointer(value.dtype, 0 if value.aligned else value.dtype.itemsize)
    if isinstance(value, Descriptor):
        return value.stand_in
    if isinstance(value, Scalar):
        return value.example
    if isinstance(value, tuple):
        made = [_stand_in(each) for each in value]
        return type(value)(*made) if hasattr(value, "_fields") else tuple(made)
    return value


def _of_tensor(x: Argument) -> Callable[[Values], Any]:
    """Triton takes a tensor for its address and dtype; a view of another dtype or offset is a pointer of ours."""
    if _INTERPRETED:
        return x.tensor  # the interpreter works on tensors
    if not x.is_view:
        slot = x.slot
        return lambda values: values[slot]
    return lambda values: _Pointer(x.dtype, x.address(values))


def _ordered(launch: Launch) -> tuple[Any, ...]:
    """Arguments and constants in the order of the kernel's parameters."""
    given = {**launch.args, **launch.constants}
    names = launch.kernel.arg_names
    assert not (wrong := argument_mismatch(launch.kernel.__name__, names, given)), wrong
    return tuple(given[name] for name in names)


# Launching


def bind(launch: Launch, where: torch.device) -> Callable[[Values], None]:
    """What runs the launch for a call's values, on the current device and torch's current stream.

    Triton's own launcher looks at every argument at every call. Here what decides the code is fixed by the plan, so
    only the first call goes that way, and the first for each value of scalars among the constants; the others go to the
    compiled kernel.
    """
    kernel, options = launch.kernel, _options(launch, where)
    grid = launch.grid if isinstance(launch.grid, tuple) else (launch.grid,)
    assert all(isinstance(size, int) for size in grid), "a grid of Triton's is given by numbers"
    resolved = resolver(_ordered(launch), _of_tensor)
    if _INTERPRETED:
        return lambda values: kernel[grid](*map(_in_fp32, resolved(values)))
    if device.arch(where) == _MISCOMPILED and _by_narrow_loads(launch):
        compile(launch, _MISCOMPILED)  # which looks at the code; the launch finds it in Triton's cache

    def every_time(values: Values) -> Any:
        return kernel[grid](*resolved(values), **options)

    if not _one_code(launch):
        return every_time
    sizes = (*grid, 1, 1)[:3]
    deciding = tuple(x for x in launch.constants.values() if isinstance(x, Scalar))
    compiled: dict[Any, tuple[Any, Any, Any]] = {}  # device, deciding values -> launcher, function and its metadata
    current_device, current_stream = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream

    def run(values: Values) -> None:
        index = current_device()
        code = (index, *[x.value(values) for x in deciding]) if deciding else index
        found = compiled.get(code)
        enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        if found is None or _called(enter) or _called(leave):
            made = every_time(values)
            compiled[code] = made.run, made.function, made.packed_metadata
            return
        start, function, metadata = found
        start(*sizes, current_stream(index), function, metadata, None, enter, leave, *resolved(values))

    return run


def _in_fp32(x: Any) -> Any:
    """A float, or those of a group, as the interpreter takes it for fp32, which a compiled kernel is always given.

    It would make fp64 of what is too small for a normal number of fp32, and refuse to multiply with it.
    """
    if isinstance(x, float):
        return x if abs(x) >= _LEAST_FP32 or x != x else 0.0 * x
    if isinstance(x, tuple):
        made = map(_in_fp32, x)
        return type(x)(*made) if hasattr(x, "_fields") else tuple(made)
    return x


def _called(hook: Any) -> bool:
    """Whether a profiler has set Triton's hook."""
    return bool(getattr(hook, "calls", hook))


def _one_code(launch: Launch) -> bool:
    """Whether all calls of a plan run the same code: an integer's type and divisibility may change it.

    A parameter with a type is still specialized on divisibility by 16 and on 1, unless do_not_specialize names it.
    """
    typed = {p.name for p in launch.kernel.params if p.annotation_type and p.do_not_specialize}
    return not any(name not in typed and _has_integer(x) for name, x in launch.args.items())


def _has_integer(x: Any) -> bool:
    """Whether an argument, or one of a group of them, is an integer that a call brings."""
    if isinstance(x, tuple) and not isinstance(x, TensorSpec):
        return any(map(_has_integer, x))
    return isinstance(x, Scalar) and x.kind is int


def _options(launch: Launch, where: torch.device) -> dict[str, Any]:
    pdl = launch.pdl and device.arch_number(where) >= PDL
    return {**launch.options, **({"launch_pdl": True} if pdl else {})}


# Compiling


def compile(launch: Launch, arch: str) -> Artifact:
    """Specializes as a launch would: on what is None, 16-byte pointers, integers that are 1 or multiples of 16."""
    arguments = tuple(_stand_in(value) for value in _ordered(launch))
    made = _compiled(launch.kernel, arguments, dict(launch.options), launch.pdl, arch)
    if arch == _MISCOMPILED and "wgmma" in made.code["ptx"] and _by_narrow_loads(launch):
        _require_set_registers(launch, made)
    return made


def _by_narrow_loads(launch: Launch) -> bool:
    """Whether tiles may come through registers: not every tensor can be loaded by 16 bytes as far as Triton knows."""
    return any(map(_is_narrow, launch.args.values()))


def _is_narrow(x: Any) -> bool:
    if isinstance(x, TensorSpec):
        steps = (step for size, step in zip(x.shape, x.strides) if size > 1 and step != 1)
        return not x.aligned or any(step % 16 for step in steps)
    return isinstance(x, tuple) and any(map(_is_narrow, x))


def _require_set_registers(launch: Launch, made: Artifact) -> None:
    """ptxas 12.8 names what wgmma multiplies by uniform registers that it forgets to set (docs/verification.md)."""
    assert made.cubin is not None
    for text in unset_registers(made.cubin).values():
        raise CompileFailed(
            f"{launch.kernel.__name__}: its machine code reads a uniform register that nothing sets ({text}), so it "
            "would multiply what lies anywhere. ptxas 12.8, which Triton brings, does this where tensors cannot be "
            "loaded by 16 bytes. Set TRITON_PTXAS_PATH to the ptxas of CUDA 13 (pip install nvidia-cuda-nvcc has one), "
            "or give tensors that begin at multiples of 16 bytes and whose strides are multiples of 16"
        )


def _compiled(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any], pdl: bool, arch: str) -> Artifact:
    if not isinstance(kernel, triton.JITFunction):
        raise CompileFailed(
            "TRITON_INTERPRET=1 replaced this kernel by its interpreter: compile in a process without it"
        )
    target = GPUTarget("cuda", device.number(arch), 32)
    backend = make_backend(target)
    if pdl := pdl and target.arch >= PDL:
        options = options | {"launch_pdl": True}
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, _ = bind(*arguments, **options)
    # Triton's own way from arguments to a source: a launch finds in its cache what is compiled here.
    made = kernel._pack_args(backend, dict(options), bound, specialization, options)
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, *made[1:])
    built = triton.compile(source, target=target, options=made[0].__dict__)
    if pdl and "griddepcontrol.wait" not in built.asm["ptx"]:
        raise CompileFailed(f"{kernel} is launched with pdl=True, so it must call pdl_wait() before it touches memory")
    used = toolkit.resources(built.asm["cubin"])
    code = {"ir": built.asm["ttgir"], "ptx": built.asm["ptx"]}
    return Artifact(arch, code, built.asm["cubin"], used.registers, used.spills, built.metadata.shared)
