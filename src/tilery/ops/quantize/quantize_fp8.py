"""Contract of quantize_fp8."""

from typing import Any

import torch
from torch import Tensor

from tilery.base.rows import rows as rows_of
from tilery.base.spec import Bucket, Cost, TensorSpec, case, dtype_name
from tilery.core import inputs as draw
from tilery.core.call import Call
from tilery.core.op import op
from tilery.core.peers import Compiled, baselines
from tilery.ops.quantize import formats
from tilery.ops.rows import contract as rows

_FROM = (torch.float32, torch.float16, torch.bfloat16)


def _check(call: Call) -> None:
    rows.check_rows("x", call.x, _FROM)
    formats.check(call.per, call.layout, call.format)


def _outputs(call: Call) -> dict[str, TensorSpec]:
    return formats.outputs(call.x, call.per, call.layout, call.format)


def _cost(call: Call) -> Cost:
    m, n, _ = rows_of(call.x)
    reads = 2 * call.x.nbytes if call.per == "tensor" else call.x.nbytes  # the scale is known when all has been read
    return Cost(4 * m * n, reads, sum(spec.nbytes for spec in _outputs(call).values()))


def _bucket(call: Call) -> Bucket:
    m, n, _ = rows_of(call.x)
    exact = f"n={n},{dtype_name(call.x.dtype)},{call.per},{call.layout},{call.format}"
    return Bucket(exact=exact, scaled={"m": m})


def _inputs(
    m: int, n: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none", batch: int = 0,
    per: str = "group", scales: str = "row", pow2: bool = False, format: str = "e4m3",
    device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """`layout` is x's, `scales` the layout of the scales."""
    x = rows.draw(m, n, dtype, draw.generator(seed, device), layout, special, batch)
    return {"x": x, "per": per, "layout": scales, "pow2": pow2, "format": format}


@op(
    check=_check, outputs=_outputs, cost=_cost, bucket=_bucket, inputs=_inputs, allowed=formats.ALLOWED,
    kernels={"numba": "numba_kernels:quantize_fp8", "triton": "triton_kernels:quantize_fp8"},
    baselines=baselines(torch=formats.quantized_by_torch, compile=Compiled(formats.quantized_by_torch)),
    model_sizes=lambda model: [{"n": model.hidden_size}],
    cases={
        "test": [
            case(m=3, n=1024, dtype="fp32"),
            case(m=3, n=1024, dtype="bf16"),
            case(m=5, n=1000, dtype="fp16", scales="column", pow2=True),  # the last group is short
            case(m=9, n=129, dtype="bf16", format="e5m2"),
            case(m=0, n=128, dtype="fp32"),
            case(m=2, n=256, dtype="fp16", batch=3, scales="column"),
            case(m=5, n=257, dtype="fp32", layout="misaligned"),
            case(m=3, n=72, dtype="fp16", layout="far"),
            case(m=3, n=300, dtype="fp32", special="nan"),
            case(m=3, n=300, dtype="fp16", special="inf", pow2=True),
            case(m=3, n=1000, dtype="fp32", per="token"),
            case(m=3, n=4096, dtype="bf16", per="token", format="e5m2"),
            case(m=1, n=1, dtype="fp16", per="token", pow2=True),
            case(m=3, n=0, dtype="fp32", per="token"),  # scales, but no values
            case(m=3, n=200, dtype="fp16", per="token", special="-inf"),
            case(m=2, n=40000, dtype="fp32", per="token"),
            case(m=130, n=200, dtype="fp32", per="block"),
            case(m=129, n=128, dtype="bf16", per="block", pow2=True, format="e5m2"),
            case(m=3, n=130, dtype="fp16", per="block", layout="padded"),
            case(m=3, n=130, dtype="fp32", per="block", special="nan"),
            case(m=5, n=1000, dtype="fp32", per="tensor"),
            case(m=5, n=999, dtype="bf16", per="tensor", format="e5m2"),
            case(m=5, n=256, dtype="fp16", per="tensor", layout="padded", pow2=True),
            case(m=0, n=128, dtype="fp32", per="tensor"),  # a scale, but no values
            case(m=3, n=200, dtype="fp16", per="tensor", special="inf"),
        ],
        "bench": [
            *(case(m=m, n=n, dtype="bf16") for m, n in ((16, 4096), (8192, 4096), (4096, 16384))),
            *(case(m=8192, n=4096, dtype="bf16", per=per) for per in ("token", "block", "tensor")),
        ],
        "bench_cpu": [case(m=2048, n=4096, dtype="fp32", per=per) for per in formats.PER],
    },
)  # fmt: skip
def quantize_fp8(
    x: Tensor, per: str = "group", layout: str = "row", pow2: bool = False, format: str = "e4m3"
) -> tuple[Tensor, Tensor]:
    """x [..., K] ≈ values · scales, with one scale per tensor, token, group of 128 or block of 128 × 128.

    ops/quantize/formats.py says how scales are made and how they lie.
    """
    return formats.quantized(x, per, format, pow2)
