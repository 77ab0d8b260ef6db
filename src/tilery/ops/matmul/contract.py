"""Contracts of products: what is allowed, how operands are checked, drawn and costed, and what peers are asked."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilery.base.errors import BadInput, require
from tilery.base.spec import Case, Cost, TensorSpec, case, dtype_name
from tilery.core import inputs
from tilery.core.call import Call
from tilery.ops.matmul.call import warps_of_k

# fp32 is true fp32 unless tf32 is asked for, which gives 3e-4 where it is used. One running fp32 sum of 2**14 products
# gives 2.2e-6.
ALLOWED = {torch.float32: 5e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}
ALLOWED_TF32 = {torch.float32: 1e-3}
_LONG_SUM = 2048  # products, up to which the error does not grow
PRECISIONS = ("ieee", "tf32")
# What cases of products with an epilogue declare as refused: tensor cores round fp32.
TF32 = {"cuda.hopper": "tf32"}
ROUNDS = {"vendor": "which the contract does once"}  # 16-bit results before something is added or applied
FAR = {"vendor": "must not span 2**31 values with gaps"}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


# Kernels


def gemv_first(call: Any) -> str | None:
    """`first` of products: one row needs no tensor cores where loads are full and lines of b begin at 128 bytes.

    On an H200 that took 2 to 8 % less time than the best tuned config of `cuda.hopper`, on ten shapes of ten.
    """
    one = call.m == 1 and call.a.device.type == "cuda"
    whole = warps_of_k(call.k) is not None and call.b_strides.column * call.b.dtype.itemsize % 128 == 0
    return "cuda.gemv" if one and whole else None


# Cases


def with_gemv(k_major: tuple[str, ...], default: str, cases: dict[str, list[Case]]) -> dict[str, list[Case]]:
    """The cases, each with what cuda.gemv refuses of it; `k_major`: values of layout_b that are contiguous along K."""
    return {
        kind: [case(c.refused_by | _refused_by_gemv(c.params, k_major, default), **c.params) for c in listed]
        for kind, listed in cases.items()
    }


def _refused_by_gemv(params: dict[str, Any], k_major: tuple[str, ...], default: str) -> dict[str, str]:
    m, k, layout = params["m"], params["k"], params.get("layout", "contiguous")
    why = ""
    if params["dtype"] == "fp32":
        why = "takes fp16 and bf16"
    elif m > 8 or (k_major[0] == "contiguous" and m * params.get("batch", 1) > 8):
        why = "takes at most 8 rows"
    elif k == 0 or k % 8:
        why = "takes K a multiple of 8"
    elif layout == "misaligned" or (layout == "transposed" and m > 1) or params.get("layout_b", default) not in k_major:
        why = "contiguous along K"
    return {"cuda.gemv": why} if why else {}


# Checks


def check_precision(precision: str, dtype: torch.dtype) -> None:
    require(precision in PRECISIONS, f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    require(
        precision == "ieee" or dtype == torch.float32,
        f"precision tf32 is a way to multiply fp32, got {dtype_name(dtype)}",
    )


def check_operand(name: str, x: TensorSpec, sizes: str) -> None:
    """`sizes` names the dimensions. One of the last two must be contiguous; the others may have any stride."""
    require(x.dtype in ALLOWED, f"{name} must be {', '.join(map(dtype_name, ALLOWED))}, got {dtype_name(x.dtype)}")
    count = sizes.count(",") + 1
    require(len(x.shape) == count, f"{name} must be {sizes}, {count} dimensions, got shape {list(x.shape)}")
    require(
        1 in x.strides[-2:] or x.shape[-2] <= 1 or x.shape[-1] <= 1,
        f"{name} {sizes} must have stride 1 along one of its last two dimensions, got strides {list(x.strides)}; "
        "call .contiguous() on it",
    )


def check_same_dtype(a: TensorSpec, b: TensorSpec) -> None:
    require(a.dtype == b.dtype, f"b must be {dtype_name(a.dtype)} as a is, got {dtype_name(b.dtype)}")


def allowed(call: Call) -> dict[torch.dtype, float]:
    return ALLOWED_TF32 if call.precision == "tf32" else allowed_of_sums(call.a.dtype, call.k)


def allowed_of_sums(dtype: torch.dtype, k: int) -> dict[torch.dtype, float]:
    """Errors of sums of k products. For fp16 and bf16 fp32's stands for the sum before it is rounded.

    Tensor cores cut off what does not fit fp32 at every 16 products or so, always towards zero. On an H200 an element
    of a bf16 product with K = 14336 was off by 3.6e-5 of its row's rms, 1.3 times what is allowed without the factor.
    """
    if dtype == torch.float32:
        return ALLOWED
    return ALLOWED | {torch.float32: ALLOWED[torch.float32] * max(1.0, k / _LONG_SUM)}


# Costs and buckets


def cost(m: int, n: int, k: int, *read: TensorSpec | None, epilogue: int = 0) -> Cost:
    """Cost of c [M, N], in the dtype of the first that is read; `epilogue` flops for each of its elements."""
    reads = sum(x.nbytes for x in read if x is not None)
    assert read[0] is not None
    return Cost((2 * k + epilogue) * m * n, reads, m * n * read[0].dtype.itemsize)


# Inputs


def draw(
    count: int, rows: int, columns: int, dtype: str, g: torch.Generator, layout: str = "contiguous",
    special: str = "none",
) -> Tensor:  # fmt: skip
    """Normal values in a [count, rows, columns] view; "transposed": of matrices [columns, rows], each contiguous."""
    if layout not in inputs.LAYOUTS:
        raise BadInput(f"layout must be one of {', '.join(inputs.LAYOUTS)}, got {layout!r}")
    if layout == "transposed":
        values = inputs.matrix(count * columns, rows, dtype, g, special=special)
        return values.unflatten(0, (count, columns)).transpose(1, 2)
    return inputs.matrix(count * rows, columns, dtype, g, layout, special).unflatten(0, (count, rows))


# Peers


@contextmanager
def torch_precision(precision: str) -> Iterator[None]:
    """Inside, torch multiplies fp32 as asked for."""
    flags, before = torch.backends.cuda.matmul, torch.backends.cuda.matmul.allow_tf32
    flags.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        flags.allow_tf32 = before


def peer(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A peer of an op whose last argument is the precision, which torch takes by a flag."""

    def call(*args: Any) -> Tensor:
        with torch_precision(args[-1]):
            return function(*args)

    return call
