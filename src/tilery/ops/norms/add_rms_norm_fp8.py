"""Contract of add_rms_norm_fp8."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from tilery.base.spec import Cost, TensorSpec
from tilery.core import inputs as draw
from tilery.core.call import Call
from tilery.core.op import op
from tilery.core.peers import Compiled, baselines
from tilery.ops.norms import contract as norms
from tilery.ops.norms import rms_norm_fp8 as plain
from tilery.ops.quantize import formats
from tilery.ops.rows import contract as rows


def _check(call: Call) -> None:
    norms.check_residual(call)
    plain.check(call)


def _outputs(call: Call) -> dict[str, TensorSpec]:
    return {**plain.outputs(call), "residual_out": rows.like(call.x)}


def _cost(call: Call) -> Cost:
    least = rows.cost_rows(call.x, flops=8, reads=2, extra=call.weight.nbytes)
    return least._replace(writes=sum(spec.nbytes for spec in _outputs(call).values()))


def _inputs(
    m: int, n: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none", batch: int = 0,
    eps: float = 1e-6, offset: float = 0.0, per: str = "token", scales: str = "row", pow2: bool = False,
    format: str = "e4m3", device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """The inputs of rms_norm_fp8 and a residual, all multiples of 1/32: their sum needs no rounding in any dtype, so
    that the reference quantises the very sum that kernels do."""
    given: dict[str, Any] = plain.inputs(
        m, n, dtype, layout, special, batch, eps, offset, per, scales, pow2, format, device, seed
    )
    residual = rows.draw(m, n, dtype, draw.generator(seed + 1, device), "contiguous", "none", batch)
    for t in (given["x"], residual):
        t.copy_((t * 32).round().div(32).where(~t.isfinite() | (t.abs() < 4), 1.0))
    return {"x": given["x"], "residual": residual, **given}


def _torch(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float, per: str, layout: str, pow2: bool,
    format: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    total = x + residual
    y = F.rms_norm(total.float(), weight.shape, norms.shifted(weight, offset).float(), eps)
    return *plain.quantised_torch(y, per, layout, pow2, format), total


@op(
    check=_check, outputs=_outputs, cost=_cost, bucket=plain.bucket, inputs=_inputs,
    allowed=norms.ALLOWED | formats.ALLOWED, rounds_between=True,
    runtime=("eps", "offset"), check_runtime=norms.check_eps,
    kernels={
        "numba": "tilery.ops.norms.numba.forward:add_rms_norm_fp8",
        "triton": "tilery.ops.norms.triton.forward:add_rms_norm_fp8",
        "cuda": "cuda_kernels:add_rms_norm_fp8",
    },
    first=rows.cuda_first(8192),
    baselines=baselines(torch=_torch, compile=Compiled(_torch)),
    model_sizes=lambda model: [{"n": model.hidden_size}],
    cases={"test": norms.fp8_cases(), **norms.fp8_bench_cases()},
)  # fmt: skip
def add_rms_norm_fp8(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, offset: float = 0.0, per: str = "token",
    layout: str = "row", pow2: bool = False, format: str = "e4m3",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(values, scales, residual_out): residual_out = x + residual, rounded to its dtype, and its RMS norm as fp8 times
    scales (see rms_norm_fp8); x, residual, values, residual_out [..., N], weight [N]."""
    total = x + residual
    values, scales = plain.rms_norm_fp8.reference(total, weight, eps, offset, per, layout, pow2, format)
    return values, scales, total
