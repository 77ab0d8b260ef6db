"""Matrix products with an epilogue: what the contracts of matmul, linear, linear_silu_mul and matmul_add share.

`Product` is what their kernels are given, c = act(alpha · a b + bias) + beta · addend, of tensors or of specs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tilery.base.errors import require
from tilery.base.spec import Cost, TensorSpec, dtype_name
from tilery.parts import rows

# fp32 is true fp32 unless tf32 is asked for, which gives 3e-4 where it is used. One running fp32 sum of 2**14 products
# gives 2.2e-6.
ALLOWED = {torch.float32: 5e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}
ALLOWED_TF32 = {torch.float32: 1e-3}
PRECISIONS = ("ieee", "tf32")
# What cases of products with an epilogue declare as refused: tensor cores round fp32, TMA wants rows on 16 bytes.
TF32 = {"cuda.hopper": "tf32"}
TMA = {"cuda.hopper": "16 bytes"}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


class Product(NamedTuple):
    a: Any
    b: Any
    c: Any  # None where a kernel is only asked whether and how
    m: int
    n: int
    k: int
    a_row: int  # strides
    a_column: int
    b_row: int
    b_column: int
    bias: Any = None  # [N]
    addend: Any = None  # [M, N]
    addend_row: int = 0
    addend_column: int = 0
    alpha: float | None = None
    beta: float | None = None
    act: str = "none"
    precision: str = "ieee"
    halves: int = 1  # 2: b has 2N columns, and c = act(a · its first N) · (a · its last N)


def of_matmul(outs: Any, a: Any, b: Any, *more: Any, **named: Any) -> Product:
    """a [M, K] · b [K, N]; `more` and `named` are Product's fields from bias on."""
    (m, k), n = a.shape, b.shape[1]
    strides = a.stride(0), a.stride(1), b.stride(0), b.stride(1)
    return Product(a, b, outs and outs[0], m, n, k, *strides, *more, **named)


def of_linear(outs: Any, x: Any, weight: Any, *more: Any, halves: int = 1) -> Product:
    """x [..., K] · weight [N, K]ᵀ; `more` are Product's fields from bias on."""
    m, k, stride = rows.rows(x)
    n = weight.shape[0] // halves
    return Product(x, weight, outs and outs[0], m, n, k, stride, 1, weight.stride(1), weight.stride(0), *more)


# Contracts


def check_precision(precision: str, dtype: torch.dtype) -> None:
    require(precision in PRECISIONS, f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    require(
        precision == "ieee" or dtype == torch.float32,
        f"precision tf32 is a way to multiply fp32, got {dtype_name(dtype)}",
    )


def allowed(first: TensorSpec, *rest: Any) -> dict[torch.dtype, float]:
    """Of an op whose last scalar is the precision."""
    return ALLOWED_TF32 if rest[-1] == "tf32" else ALLOWED


def check_linear(x: TensorSpec, weight: TensorSpec, precision: str) -> None:
    rows.check_rows("x", x, ALLOWED)
    k = x.shape[-1]
    require(
        len(weight.shape) == 2 and weight.shape[1] == k,
        f"weight must be [N, {k}], to agree in K with x [..., K] {list(x.shape)}, got {list(weight.shape)}",
    )
    require(
        1 in weight.strides or any(size <= 1 for size in weight.shape),
        f"weight must have stride 1 along one dimension, got strides {list(weight.strides)}; call .contiguous() on it",
    )
    require(weight.dtype == x.dtype, f"weight must be {dtype_name(x.dtype)} as x is, got {dtype_name(weight.dtype)}")
    check_precision(precision, x.dtype)


def cost(m: int, n: int, k: int, *read: TensorSpec | None, epilogue: int = 0) -> Cost:
    """Of c [M, N], in the dtype of the first that is read; `epilogue` flops for each of its elements."""
    reads = sum(x.nbytes for x in read if x is not None)
    assert read[0] is not None
    return Cost((2 * k + epilogue) * m * n, reads, m * n * read[0].dtype.itemsize)


def weight_layout(weight: Any) -> str:
    """'t' where K is contiguous, as torch's own layers have it, else 'n': as matmul says of weight.t()."""
    return "t" if weight.stride(1) == 1 else "n"


# Peers


@contextmanager
def torch_precision(precision: str) -> Iterator[None]:
    """torch's products of fp32 as asked for."""
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
