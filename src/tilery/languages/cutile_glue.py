"""cuTile: compile a launch for an architecture that need not be present, and run it on torch's stream.

In a `Launch`, `kernel` is what `ct.kernel` decorates, `constants` are its `ct.Constant` parameters and `options` hints
to the compiler (num_worker_warps, num_ctas, occupancy). Tensors are passed as arrays. A constant may be a `Scalar`,
whose few values have code of their own each.
"""

import functools
import inspect
import io
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cuda.tile as ct
import torch
from cuda.tile.compilation import ArrayConstraint, CallingConvention, KernelSignature, ScalarConstraint, export_kernel

from tilery.base.errors import CompileFailed, ToolMissing
from tilery.base.launch import Argument, Launch, Scalar, Values, argument_mismatch, assert_plain, resolver
from tilery.base.spec import Artifact, TensorSpec
from tilery.hardware import toolkit

_DTYPE = {
    torch.float32: ct.float32, torch.bfloat16: ct.bfloat16, torch.float16: ct.float16,
    torch.float8_e4m3fn: ct.float8_e4m3fn, torch.float8_e5m2: ct.float8_e5m2,
    torch.int32: ct.int32, torch.int64: ct.int64,
}  # fmt: skip
_MOST_BLOCKS = 2**24 - 1  # cuTile numbers its blocks in 24 bits


# Launching


def bind(launch: Launch, where: torch.device) -> Callable[[Values], None]:
    """What runs the launch for a call's values; cuTile compiles at the first launch of each specialization."""
    assert_plain(launch)
    kernel, grid = _hinted(launch.kernel, **launch.options), launch.grid
    assert isinstance(grid, int), "a grid of cuTile's is one number"
    resolved = resolver(_ordered(launch), _of_tensor)
    current_device, current_stream = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream

    def run(values: Values) -> None:
        ct.launch(current_stream(current_device()), (grid,), kernel, tuple(resolved(values)))

    return run


def _of_tensor(x: Argument) -> Callable[[Values], Any]:
    return x.tensor


def _ordered(launch: Launch) -> tuple[Any, ...]:
    """Arguments and constants in the order of the kernel's parameters."""
    given, names = {**launch.args, **launch.constants}, inspect.signature(launch.kernel._pyfunc).parameters
    assert not (wrong := argument_mismatch(launch.kernel._pyfunc.__name__, names, given)), wrong
    return tuple(given[name] for name in names)


@functools.cache
def _hinted(kernel: Any, **hints: int | None) -> Any:
    """The kernel with hints to the compiler; each combination keeps compiled code of its own."""
    return kernel.replace_hints(**hints) if hints else kernel


def hint_refusal(num_worker_warps: int, occupancy: int | None = None, **sizes: int) -> str | None:
    """What cuTile does not take of a config; `sizes` are a tile's."""
    for name, size in sizes.items():
        if size < 1 or size & (size - 1):
            return f"{name} must be a power of two, as a tile's sizes are, got {size}"
    if num_worker_warps not in (4, 8):
        return f"num_worker_warps must be 4 or 8 for tileiras 13.4, got {num_worker_warps}"
    if occupancy is not None and not 1 <= occupancy <= 32:
        return f"occupancy must be 1 to 32, got {occupancy}"
    return None


def stores_by_tma(x: TensorSpec) -> bool:
    """Whether `ct.store` may use TMA: of a single row it writes all 16 bytes of the last part, also behind the row.

    Where there are several rows of such a length, cuTile itself uses no TMA.
    """
    return x.shape[-1] * x.dtype.itemsize % 16 == 0


def grid_refusal(blocks: int) -> str | None:
    return f"needs {blocks} blocks, and cuTile launches at most {_MOST_BLOCKS}" if blocks > _MOST_BLOCKS else None


# Compiling


def compile(launch: Launch, arch: str) -> Artifact:
    constants = {n: x.example if isinstance(x, Scalar) else x for n, x in launch.constants.items()}
    return _compiled(_hinted(launch.kernel, **launch.options), _ordered(replace(launch, constants=constants)), arch)


def _compiled(kernel: Any, arguments: tuple[Any, ...], arch: str) -> Artifact:
    annotations = inspect.get_annotations(kernel._pyfunc)
    named = zip(inspect.signature(kernel._pyfunc).parameters, arguments, strict=True)
    parameters = [_parameter(value, annotations.get(name) is ct.IndexedWithInt64) for name, value in named]
    signature = KernelSignature(parameters, CallingConvention.cutile_python_v2())
    built, bytecode = io.BytesIO(), io.BytesIO()
    try:
        export_kernel(kernel, [signature], built, gpu_code=arch, output_format="cubin")
        export_kernel(kernel, [signature], bytecode, gpu_code=arch, output_format="tileir_bytecode")
    except ct.TileError as error:
        raise CompileFailed(f"{kernel._pyfunc.__name__} does not build for {arch}: {error}") from error
    used = toolkit.resources(built.getvalue())  # all of cuTile's shared memory is static
    return Artifact(arch, _code(bytecode.getvalue()), built.getvalue(), used.registers, used.spills, used.shared)


def _parameter(value: Any, wide: bool) -> Any:
    """Specializes as a launch would: on strides and sizes of 1, on 16-byte pointers and strides, on sizes of 16s."""
    if isinstance(value, float) or (isinstance(value, Scalar) and value.kind is float):
        return ScalarConstraint(ct.float32)
    if not isinstance(value, TensorSpec):
        return value
    vector = 16 // value.dtype.itemsize
    return ArrayConstraint(
        _DTYPE[value.dtype],
        len(value.shape),
        index_dtype=ct.int64 if wide else ct.int32,
        stride_lower_bound_incl=0,
        alias_groups=(),
        may_alias_internally=False,
        stride_constant=[1 if stride == 1 else None for stride in value.strides],
        shape_constant=[1 if size == 1 else None for size in value.shape],
        stride_divisible_by=[vector if stride % vector == 0 else 1 for stride in value.strides],
        shape_divisible_by=[16 if size % 16 == 0 else 1 for size in value.shape],
        base_addr_divisible_by=16 if value.aligned else 1,
    )


def _code(bytecode: bytes) -> dict[str, str]:
    """Tile IR as text, by a tool that lies beside tileiras from 13.4 on; PTX is never made."""
    try:
        disassembler = str(toolkit.find("tileirdisasm"))
    except ToolMissing:
        return {}
    with tempfile.NamedTemporaryFile(suffix=".tileirbc") as file:
        file.write(bytecode)
        file.flush()
        command = [disassembler, file.name]
        return {"ir": subprocess.run(command, check=True, capture_output=True, encoding="utf-8").stdout}
