from typing import Any

import torch
from torch import Tensor

from tilery.base.errors import require
from tilery.base.spec import DTYPES, Bucket, Cost, TensorSpec, case, dtype_name
from tilery.core import inputs as draw
from tilery.core.op import op
from tilery.core.peers import Compiled, baselines
from tilery.parts import fp8, rows

ALLOWED = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}
FROM = tuple(DTYPES[format] for format in fp8.LARGEST)
TO = tuple(map(dtype_name, ALLOWED))


def check(values: TensorSpec, scales: TensorSpec, per: str, dtype: str) -> None:
    rows.check_rows("values", values, FROM)
    fp8.check(per, "row", dtype_name(values.dtype))
    require(dtype in TO, f"dtype must be one of {', '.join(TO)}, got {dtype!r}")
    m, k, _ = rows.rows(values)
    shape = fp8.scale_shape(m, k, per)
    require(
        scales.shape == shape,
        f"scales must be {list(shape)} for values {list(values.shape)} and per={per!r}, got {list(scales.shape)}",
    )
    require(scales.dtype == torch.float32, f"scales must be fp32, got {dtype_name(scales.dtype)}")


def outputs(values: TensorSpec, scales: TensorSpec, per: str, dtype: str) -> tuple[TensorSpec, ...]:
    return (TensorSpec.contiguous(values.shape, DTYPES[dtype], values.device),)


def cost(values: TensorSpec, scales: TensorSpec, per: str, dtype: str) -> Cost:
    m, k, _ = rows.rows(values)
    return Cost(m * k, values.nbytes + scales.nbytes, m * k * DTYPES[dtype].itemsize)


def bucket(values: TensorSpec, scales: TensorSpec, per: str, dtype: str) -> Bucket:
    m, k, _ = rows.rows(values)
    return Bucket(exact=f"n={k},{dtype_name(values.dtype)},{per},{dtype}", scaled={"m": m})


def inputs(
    m: int, n: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none", batch: int = 0,
    per: str = "group", scales: str = "row", format: str = "e4m3", device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """`layout` is that of the values, `scales` of the scales; `special` stands among the values."""
    g = draw.generator(seed, device)
    values = rows.draw(m, n, format, g, layout, special, batch)
    _, spec = fp8.specs(TensorSpec.of(values, aligned=True), per, scales, format)
    factors = spec.empty().copy_(torch.rand(spec.shape, generator=g, device=g.device) + 0.5)
    return {"values": values, "scales": factors, "per": per, "dtype": dtype}


def spread(scales: Tensor, m: int, k: int, per: str) -> Tensor:
    """A scale for each value, or what broadcasts to that."""
    if per in ("tensor", "token"):
        return scales.view(-1, 1)
    each = scales.repeat_interleave(fp8.GROUP, 1)[:, :k]
    return each if per == "group" else each.repeat_interleave(fp8.GROUP, 0)[:m]


def _torch(values: Tensor, scales: Tensor, per: str, dtype: str) -> Tensor:
    m, k, _ = rows.rows(values)
    if per == "group" and k % fp8.GROUP == 0:  # the quickest that torch can do
        made = values.view(m, -1, fp8.GROUP).float() * scales.unsqueeze(-1)
    else:
        made = values.reshape(m, k).float() * spread(scales, m, k, per)
    return made.to(DTYPES[dtype]).view(values.shape)


@op(
    check=check, outputs=outputs, cost=cost, bucket=bucket, inputs=inputs, allowed=ALLOWED,
    kernels=("numba", "triton"), baselines=baselines(torch=_torch, compile=Compiled(_torch)),
    model_sizes=lambda model: [{"n": model.hidden_size}],
    cases={
        "test": [
            case(m=3, n=1024, dtype="fp32"),
            case(m=3, n=1024, dtype="bf16"),
            case(m=5, n=1000, dtype="fp16", scales="column"),  # the last group is short
            case(m=9, n=129, dtype="fp32", format="e5m2"),
            case(m=0, n=128, dtype="fp32"),
            case(m=3, n=0, dtype="fp32"),
            case(m=2, n=256, dtype="fp16", batch=3, scales="column"),
            case(m=5, n=257, dtype="bf16", layout="misaligned"),
            case(m=3, n=72, dtype="fp16", layout="far"),
            case(m=3, n=300, dtype="fp32", special="nan"),
            case(m=3, n=300, dtype="fp16", special="-inf", format="e5m2"),
            case(m=3, n=1000, dtype="fp32", per="token"),
            case(m=1, n=1, dtype="fp16", per="token"),
            case(m=130, n=200, dtype="fp32", per="block"),
            case(m=129, n=128, dtype="bf16", per="block", format="e5m2"),
            case(m=5, n=999, dtype="fp32", per="tensor"),
        ],
        "bench": [
            *(case(m=m, n=n, dtype="bf16") for m, n in ((16, 4096), (8192, 4096), (4096, 16384))),
            *(case(m=8192, n=4096, dtype="bf16", per=per) for per in ("token", "block", "tensor")),
        ],
        "bench_cpu": [case(m=2048, n=4096, dtype="fp32"), case(m=2048, n=4096, dtype="bf16", per="token")],
    },
)  # fmt: skip
def dequantize_fp8(values: Tensor, scales: Tensor, per: str = "group", dtype: str = "bf16") -> Tensor:
    """y = values · scales, each scale where ops/fp8.py says; values, y [..., K]; scales in either layout."""
    m, k, _ = rows.rows(values)
    return (values.reshape(m, k).to(scales.dtype) * spread(scales, m, k, per)).view(values.shape)
