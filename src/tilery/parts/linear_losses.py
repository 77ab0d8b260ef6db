"""Losses of logits = x · weightᵀ that are never stored: what is asked of x and weight, and how they are drawn."""

import torch
from torch import Tensor

from tilery.base.errors import require
from tilery.base.spec import Bucket, Case, TensorSpec, case, dtype_name
from tilery.core import inputs
from tilery.parts import rows
from tilery.parts.losses import DTYPES, TERMS


def check_projection(x: TensorSpec, weight: TensorSpec) -> None:
    rows.check_rows("x", x, DTYPES)
    k = x.shape[-1]
    require(
        len(weight.shape) == 2 and weight.shape[1] == k and weight.shape[0] >= 1,
        f"weight must be [N, {k}] as x's rows are, with N at least 1, got {list(weight.shape)}",
    )
    require(k >= 1, f"x must have a column at least, got {list(x.shape)}")
    require(
        weight.stride(1) == 1 or k == 1,
        f"weight must have stride 1 along its last dimension, got strides {list(weight.strides)}; "
        "call .contiguous() on it",
    )
    require(weight.dtype == x.dtype, f"weight must be {dtype_name(x.dtype)} as x is, got {dtype_name(weight.dtype)}")


def bucket_projection(x: TensorSpec, weight: TensorSpec) -> Bucket:
    n, k = weight.shape
    return Bucket(exact=f"n={n},k={k},{dtype_name(x.dtype)}", scaled={"m": rows.rows(x).m})


def draw_projection(
    m: int, n: int, k: int, dtype: str, g: torch.Generator, layout: str, special: str, batch: int
) -> tuple[Tensor, Tensor]:
    """Logits are about normal."""
    x = rows.draw(m, k, dtype, g, layout, special, batch)
    return x, inputs.matrix(n, k, dtype, g) * k**-0.5


def cases() -> list[Case]:
    return [
        case(m=7, n=70, k=40, dtype="fp32", **TERMS),
        case(m=7, n=70, k=40, dtype="fp16", **TERMS),
        case(m=7, n=70, k=40, dtype="bf16", **TERMS),
        case(m=5, n=300, k=72, dtype="fp32"),
        case(m=130, n=140, k=33, dtype="fp16"),  # several tiles each way, odd tails
        case(m=130, n=140, k=33, dtype="bf16"),
        case(m=1, n=1, k=1, dtype="fp32"),
        case(m=0, n=64, k=32, dtype="fp32"),  # nothing to launch
        case(m=2, n=96, k=64, dtype="fp32", batch=3, **TERMS),  # [batch, m, k]
        case(m=5, n=64, k=64, dtype="fp16", layout="padded"),
        case(m=5, n=64, k=64, dtype="fp32", layout="misaligned"),
        case(m=3, n=64, k=32, dtype="fp16", layout="far"),  # more than 2**31 elements from first to last
        case(m=7, n=64, k=32, dtype="fp32", special="nan"),
        case(m=8, n=70, k=32, dtype="fp32", outside=True),
        case(m=8, n=70, k=32, dtype="fp16", ignored=True, ignore_index=2**40, label_smoothing=1.0),
        case(m=8, n=70, k=32, dtype="bf16", outside=True, ignored=True, ignore_index=7),
    ]
