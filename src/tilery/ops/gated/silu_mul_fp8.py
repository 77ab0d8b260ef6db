"""Contract of silu_mul_fp8."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from tilery.base.spec import Bucket, Cost, TensorSpec, case
from tilery.core.op import op
from tilery.core.peers import Compiled, baselines
from tilery.ops.gated import contract
from tilery.ops.gated.call import GatedCall
from tilery.ops.quantize import formats

_PER = ("token", "group")


def _check(call: GatedCall) -> None:
    contract.check(call)
    formats.check(call.per, call.layout, call.format, _PER)


def _outputs(call: GatedCall) -> dict[str, TensorSpec]:
    return formats.outputs(call.halves[0], call.per, call.layout, call.format)


def _cost(call: GatedCall) -> Cost:
    m, n, _ = call.rows
    return Cost(9 * m * n, 2 * call.halves[0].nbytes, sum(spec.nbytes for spec in _outputs(call).values()))


def _bucket(call: GatedCall) -> Bucket:
    return contract.bucket(call, call.per, call.layout, call.format)


def _inputs(
    m: int, n: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none", batch: int = 0,
    packed: bool = False, per: str = "group", scales: str = "row", pow2: bool = False, format: str = "e4m3",
    device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """`layout` is gate's, `scales` the layout of the scales."""
    drawn = contract.inputs(m, n, dtype, layout, special, batch, packed, device, seed)
    return {**drawn, "per": per, "layout": scales, "pow2": pow2, "format": format}


def _torch(gate: Tensor, up: Tensor | None, *how: Any) -> tuple[Tensor, Tensor]:
    gate, up = contract.split(gate, up)
    return formats.quantized_by_torch(F.silu(gate.float()) * up, *how)


@op(
    check=_check, outputs=_outputs, cost=_cost, bucket=_bucket, inputs=_inputs, allowed=formats.ALLOWED,
    call_type=GatedCall,
    kernels={
        "numba": "tilery.ops.quantize.numba_kernels:silu_mul_fp8",
        "triton": "tilery.ops.quantize.triton_kernels:silu_mul_fp8",
    },
    baselines=baselines(torch=_torch, compile=Compiled(_torch)),
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
        "bench_cpu": [case(m=2048, n=4096, dtype="fp32", per=per) for per in _PER],
    },
)  # fmt: skip
def silu_mul_fp8(
    gate: Tensor, up: Tensor | None = None, per: str = "group", layout: str = "row", pow2: bool = False,
    format: str = "e4m3",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """silu(gate) · up [..., N] as values · scales, per token or group of 128; gate and up are those of silu_mul.

    ops/quantize/formats.py says how scales are made and how they lie.
    """
    return formats.quantized(contract.reference(gate, up, "silu"), per, format, pow2)
