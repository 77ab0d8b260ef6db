from typing import Any

import torch.nn.functional as F
from torch import Tensor

from tilery.base.spec import Bucket, Cost, TensorSpec, case
from tilery.core.op import op
from tilery.core.peers import Compiled, baselines
from tilery.ops.quantize_fp8 import in_torch
from tilery.parts import fp8, gated, rows

PER = ("token", "group")


def check(gate: TensorSpec, up: TensorSpec | None, per: str, layout: str, pow2: bool, format: str) -> None:
    gated.check_pair("gate", gate, up)
    fp8.check(per, layout, format, PER)


def outputs(
    gate: TensorSpec, up: TensorSpec | None, per: str, layout: str, pow2: bool, format: str
) -> tuple[TensorSpec, ...]:
    return fp8.specs(gated.pair(gate, up)[0], per, layout, format)


def cost(gate: TensorSpec, up: TensorSpec | None, per: str, layout: str, pow2: bool, format: str) -> Cost:
    gate, up = gated.pair(gate, up)
    m, n, _ = rows.rows(gate)
    return Cost(9 * m * n, 2 * gate.nbytes, sum(spec.nbytes for spec in fp8.specs(gate, per, layout, format)))


def bucket(gate: TensorSpec, up: TensorSpec | None, per: str, layout: str, pow2: bool, format: str) -> Bucket:
    return gated.bucket(gate, up, per, layout, format)


def inputs(
    m: int, n: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none", batch: int = 0,
    packed: bool = False, per: str = "group", scales: str = "row", pow2: bool = False, format: str = "e4m3",
    device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """`layout` is gate's, `scales` the layout of the scales."""
    drawn = gated.inputs(m, n, dtype, layout, special, batch, packed, device, seed)
    return {**drawn, "per": per, "layout": scales, "pow2": pow2, "format": format}


def _torch(gate: Tensor, up: Tensor | None, *how: Any) -> tuple[Tensor, Tensor]:
    gate, up = gated.pair(gate, up)
    return in_torch(F.silu(gate.float()) * up, *how)


@op(
    check=check, outputs=outputs, cost=cost, bucket=bucket, inputs=inputs, allowed=fp8.ALLOWED,
    kernels=("numba", "triton"), baselines=baselines(torch=_torch, compile=Compiled(_torch)),
    model_sizes=lambda model: [{"n": model.mlp_size}],
    cases={
        "test": [
            case(m=3, n=1024, dtype="fp32"),
            case(m=3, n=1024, dtype="bf16"),
            case(m=5, n=1000, dtype="fp16", scales="column", pow2=True, packed=True),  # the last group is short
            case(m=9, n=129, dtype="bf16", format="e5m2", packed=True),
            case(m=0, n=128, dtype="fp32"),
            case(m=2, n=256, dtype="fp16", batch=3, scales="column"),
            case(m=5, n=257, dtype="fp32", layout="misaligned"),
            case(m=3, n=72, dtype="fp16", layout="far"),
            case(m=3, n=300, dtype="fp32", special="nan"),
            case(m=3, n=300, dtype="fp16", special="inf", pow2=True),
            case(m=3, n=1000, dtype="fp32", per="token", packed=True),
            case(m=3, n=4096, dtype="bf16", per="token", format="e5m2"),
            case(m=1, n=1, dtype="fp16", per="token", pow2=True),
            case(m=2, n=40000, dtype="fp32", per="token"),
        ],
        "bench": [
            *(case(m=m, n=14336, dtype="bf16", packed=True) for m in (16, 8192)),
            *(case(m=m, n=14336, dtype="bf16", packed=True, per="token") for m in (16, 8192)),
        ],
        "bench_cpu": [case(m=2048, n=4096, dtype="fp32", per=per) for per in PER],
    },
)  # fmt: skip
def silu_mul_fp8(
    gate: Tensor, up: Tensor | None = None, per: str = "group", layout: str = "row", pow2: bool = False,
    format: str = "e4m3",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """silu(gate) · up [..., N] as values · scales, per token or group of 128: see ops/fp8.py; up as in silu_mul."""
    return fp8.quantised(gated.reference(gate, up, "silu"), per, format, pow2)
