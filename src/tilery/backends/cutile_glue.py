"""cuTile: compiles a kernel from specs for an architecture that need not be present, launches it on torch's stream."""

import functools
import inspect
import io
import subprocess
import tempfile
from dataclasses import dataclass, replace
from typing import Any

import cuda.tile as ct
import torch
from cuda.tile.compilation import ArrayConstraint, CallingConvention, KernelSignature, ScalarConstraint, export_kernel

from tilery.backends import cubin
from tilery.errors import CompileFailed
from tilery.op import Artifact, TensorSpec
from tilery.ops.rows import rows

_DTYPE = {torch.float32: ct.float32, torch.bfloat16: ct.bfloat16, torch.float16: ct.float16}
_MOST_BLOCKS = 2**24 - 1  # cuTile numbers its blocks in 24 bits


# Launching


@functools.cache
def hinted(kernel: Any, **hints: int | None) -> Any:
    """The kernel with hints to the compiler; each combination keeps compiled code of its own."""
    return kernel.replace_hints(**hints)


@functools.cache
def processors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def launch(kernel: Any, blocks: int, arguments: tuple[Any, ...]) -> None:
    """On the current device and torch's current stream; cuTile compiles at the first launch of each specialization."""
    ct.launch(torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice()), (blocks,), kernel, arguments)


def refusal(blocks: int, num_worker_warps: int, occupancy: int | None, **sizes: int) -> str | None:
    """What cuTile refuses of any kernel; `sizes` are a tile's."""
    for name, size in sizes.items():
        if size < 1 or size & (size - 1):
            return f"{name} must be a power of two, as a tile's sizes are, got {size}"
    if num_worker_warps not in (4, 8):
        return f"num_worker_warps must be 4 or 8 for tileiras 13.4, got {num_worker_warps}"
    if occupancy is not None and not 1 <= occupancy <= 32:
        return f"occupancy must be 1 to 32, got {occupancy}"
    if blocks > _MOST_BLOCKS:
        return f"needs {blocks} blocks, and cuTile launches at most {_MOST_BLOCKS}"
    return None


# Compiling


def compile(kernel: Any, arguments: tuple[Any, ...], arch: str) -> Artifact:
    """`arguments` are a launch's, with specs for tensors; its integers are constants, its floats are not."""
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
    used = cubin.resources(built.getvalue())  # all of cuTile's shared memory is static
    code = {"ir": _tile_ir(bytecode.getvalue())}
    return Artifact(arch, code, built.getvalue(), used.registers, used.spills, used.shared)


def _parameter(value: Any, wide: bool) -> Any:
    """Specializes as a launch would: on strides and sizes of 1, on 16-byte pointers and strides, on sizes of 16s."""
    if isinstance(value, float):
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


def _tile_ir(bytecode: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".tileirbc") as file:
        file.write(bytecode)
        file.flush()
        command = [str(cubin.find("tileirdisasm")), file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


# Row-wise kernels

_VALUES_PER_WARP = 4096  # 128 a lane: softmax takes 255 registers then and spills nothing, compiled for sm_90


@dataclass(frozen=True)
class RowConfig:
    """A block takes `rows` rows, `tile` columns at a time."""

    rows: int
    tile: int
    num_worker_warps: int = 4
    occupancy: int | None = None  # blocks on a processor that the compiler saves registers for


def row_tile(n: int) -> int:
    """The width of a tile that holds a row; a block has 128 threads and more, so no narrower."""
    return max(1 << (n - 1).bit_length(), 128)


def matrix(x: Any) -> Any:
    """[..., N] as [M, N], a view: of a tensor for a launch, of a spec for a compile."""
    if len(x.shape) == 2:
        return x
    m, n, stride = rows(x)
    if isinstance(x, TensorSpec):
        return x._replace(shape=(m, n), strides=(stride, 1))
    return x.as_strided((m, n), (stride, 1))


def row_hinted(kernel: Any, config: RowConfig) -> Any:
    return hinted(kernel, num_worker_warps=config.num_worker_warps, occupancy=config.occupancy)


def row_refusal(config: RowConfig, blocks: int) -> str | None:
    values, most = config.rows * config.tile, config.num_worker_warps * _VALUES_PER_WARP
    if values > most:
        return f"tile of {values} values does not fit the registers of {config.num_worker_warps} warps ({most} values)"
    return refusal(blocks, config.num_worker_warps, config.occupancy, rows=config.rows, tile=config.tile)


def row_blocks(x: Any, config: RowConfig) -> int:
    """Of a kernel whose blocks take whole rows."""
    return ct.cdiv(rows(x).m, config.rows)


def row_default(x: TensorSpec) -> RowConfig:
    """The whole row as one tile where it fits; several short rows a block as long as that leaves many blocks."""
    m, n, _ = rows(x)
    tile = row_tile(n)
    if tile > 8 * _VALUES_PER_WARP:
        return RowConfig(rows=1, tile=4096, num_worker_warps=8)
    count = 1
    while 2 * count * tile <= 2048 and m >= 512 * count:
        count *= 2
    return RowConfig(count, tile, num_worker_warps=8 if tile > 4096 else 4)


def row_configs(x: TensorSpec) -> list[RowConfig]:
    base = row_default(x)
    hints = [replace(base, num_worker_warps=w, occupancy=o) for w in (4, 8) for o in (None, 8)]
    cuts = [replace(base, rows=4 * base.rows), RowConfig(1, min(base.tile, 4096), 8), RowConfig(1, min(base.tile, 2048))]
    return [c for c in dict.fromkeys((base, *hints, *cuts)) if row_refusal(c, row_blocks(x, c)) is None]
