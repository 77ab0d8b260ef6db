"""Contract of dequantize_fp8."""

from typing import Any

import torch
from torch import Tensor

from tilery.base.errors import require
from tilery.base.rows import rows as rows_of
from tilery.base.spec import DTYPES, Bucket, Cost, TensorSpec, case, dtype_name
from tilery.core import inputs as draw
from tilery.core.call import Call
from tilery.core.op import op
from tilery.core.peers import Compiled, baselines
from tilery.ops.quantize import formats
from tilery.ops.quantize.formats import GROUP, as_rows, scale_of_each
from tilery.ops.rows import contract as rows

_ALLOWED = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}
_FROM = tuple(DTYPES[format] for format in formats.LARGEST)
_TO = tuple(map(dtype_name, _ALLOWED))


def _check(call: Call) -> None:
    values, scales = call.values, call.scales
    rows.check_rows("values", values, _FROM)
    formats.check(call.per, "row", dtype_name(values.dtype))
    require(call.dtype in _TO, f"dtype must be one of {', '.join(_TO)}, got {call.dtype!r}")
    m, k, _ = rows_of(values)
    shape = formats.scale_shape(m, k, call.per)
    require(
        scales.shape == shape,
        f"scales must be {list(shape)} for values {list(values.shape)} and per={call.per!r}, got {list(scales.shape)}",
    )
    require(scales.dtype == torch.float32, f"scales must be fp32, got {dtype_name(scales.dtype)}")


def _outputs(call: Call) -> dict[str, TensorSpec]:
    return {"y": rows.like(call.values, DTYPES[call.dtype])}


def _cost(call: Call) -> Cost:
    m, k, _ = rows_of(call.values)
    return Cost(m * k, call.values.nbytes + call.scales.nbytes, m * k * DTYPES[call.dtype].itemsize)


def _bucket(call: Call) -> Bucket:
    m, k, _ = rows_of(call.values)
    return Bucket(exact=f"n={k},{dtype_name(call.values.dtype)},{call.per},{call.dtype}", scaled={"m": m})


def _inputs(
    m: int, n: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none", batch: int = 0,
    per: str = "group", scales: str = "row", format: str = "e4m3", device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """`layout` is that of the values, `scales` of the scales; `special` stands among the values."""
    g = draw.generator(seed, device)
    values = rows.draw(m, n, format, g, layout, special, batch)
    spec = formats.outputs(TensorSpec.of(values, aligned=True), per, scales, format)["scales"]
    factors = spec.empty().copy_(torch.rand(spec.shape, generator=g, device=g.device) + 0.5)
    return {"values": values, "scales": factors, "per": per, "dtype": dtype}


def _torch(values: Tensor, scales: Tensor, per: str, dtype: str) -> Tensor:
    flat = as_rows(values)
    m, k = flat.shape
    if per == "group" and k % GROUP == 0:  # the quickest that torch can do
        made = values.view(m, -1, GROUP).float() * scales.unsqueeze(-1)
    else:
        made = flat.float() * scale_of_each(scales, m, k, per)
    return made.to(DTYPES[dtype]).view(values.shape)


@op(
    check=_check, outputs=_outputs, cost=_cost, bucket=_bucket, inputs=_inputs, allowed=_ALLOWED,
    kernels={"numba": "numba_kernels:dequantize_fp8", "triton": "triton_kernels:dequantize_fp8"},
    baselines=baselines(torch=_torch, compile=Compiled(_torch)),
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
    """y = values · scales; values, y [..., K]; scales as quantize_fp8 makes them, in either layout."""
    flat = as_rows(values)
    m, k = flat.shape
    return (flat.to(scales.dtype) * scale_of_each(scales, m, k, per)).view(values.shape)
