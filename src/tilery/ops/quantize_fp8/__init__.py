from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilery.base.spec import DTYPES, Bucket, Cost, TensorSpec, case, dtype_name
from tilery.core import inputs as draw
from tilery.core.op import op
from tilery.core.peers import Compiled, baselines
from tilery.parts import fp8, rows

FROM = (torch.float32, torch.float16, torch.bfloat16)


def check(x: TensorSpec, per: str, layout: str, pow2: bool, format: str) -> None:
    rows.check_rows("x", x, FROM)
    fp8.check(per, layout, format)


def outputs(x: TensorSpec, per: str, layout: str, pow2: bool, format: str) -> tuple[TensorSpec, ...]:
    return fp8.specs(x, per, layout, format)


def cost(x: TensorSpec, per: str, layout: str, pow2: bool, format: str) -> Cost:
    m, n, _ = rows.rows(x)
    reads = 2 * x.nbytes if per == "tensor" else x.nbytes  # the scale is known when all has been read
    return Cost(4 * m * n, reads, sum(spec.nbytes for spec in fp8.specs(x, per, layout, format)))


def bucket(x: TensorSpec, per: str, layout: str, pow2: bool, format: str) -> Bucket:
    m, n, _ = rows.rows(x)
    return Bucket(exact=f"n={n},{dtype_name(x.dtype)},{per},{layout},{format}", scaled={"m": m})


def inputs(
    m: int, n: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none", batch: int = 0,
    per: str = "group", scales: str = "row", pow2: bool = False, format: str = "e4m3",
    device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """`layout` is x's, `scales` the layout of the scales."""
    x = rows.draw(m, n, dtype, draw.generator(seed, device), layout, special, batch)
    return {"x": x, "per": per, "layout": scales, "pow2": pow2, "format": format}


def in_torch(x: Tensor, per: str, layout: str, pow2: bool, format: str) -> tuple[Tensor, Tensor]:
    m, k, _ = rows.rows(x)
    high, wide = {"tensor": (m, k), "token": (1, k), "group": (1, fp8.GROUP), "block": (fp8.GROUP, fp8.GROUP)}[per]
    down, across = fp8.ceil_div(m, high), fp8.ceil_div(k, wide)
    parts = F.pad(x.reshape(m, k), (0, across * wide - k, 0, down * high - m)).view(down, high, across, wide).float()
    largest = fp8.LARGEST[format]
    scales = parts.abs().amax((1, 3), keepdim=True).clamp(min=fp8.TINY) / largest
    if pow2:
        scales = torch.exp2(torch.ceil(torch.log2(scales)))
    values = (parts / scales).clamp(-largest, largest).to(DTYPES[format])
    values = values.view(down * high, across * wide)[:m, :k].reshape(x.shape)
    return values, scales.view(fp8.scale_shape(m, k, per))


@op(
    check=check, outputs=outputs, cost=cost, bucket=bucket, inputs=inputs, allowed=fp8.ALLOWED,
    kernels=("numba", "triton"), baselines=baselines(torch=in_torch, compile=Compiled(in_torch)),
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
        "bench_cpu": [case(m=2048, n=4096, dtype="fp32", per=per) for per in fp8.PER],
    },
)  # fmt: skip
def quantize_fp8(
    x: Tensor, per: str = "group", layout: str = "row", pow2: bool = False, format: str = "e4m3"
) -> tuple[Tensor, Tensor]:
    """x [..., K] ≈ values · scales; one scale per tensor, token, group of 128, block of 128 × 128: see ops/fp8.py."""
    return fp8.quantised(x, per, format, pow2)
