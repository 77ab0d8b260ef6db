"""Contract of rms_norm_fp8, and what add_rms_norm_fp8 has in common with it."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tilery.base.spec import DTYPES, Bucket, Cost, TensorSpec
from tilery.core import inputs as draw
from tilery.core.call import Call
from tilery.core.op import op
from tilery.core.peers import Compiled, baselines
from tilery.ops.norms import contract as norms
from tilery.ops.norms.rms_norm import rms_norm
from tilery.ops.quantize import formats
from tilery.ops.rows import contract as rows


def check(call: Call) -> None:
    rows.check_rows("x", call.x, norms.ALLOWED)
    norms.check_vector("weight", call.weight, call.x)
    formats.check(call.per, call.layout, call.format, among=norms.PER)


def outputs(call: Call) -> dict[str, TensorSpec]:
    values, scales = formats.outputs(call.x, call.per, call.layout, call.format).values()
    return {"values": values, "scales": scales}


def _cost(call: Call) -> Cost:
    least = rows.cost_rows(call.x, flops=7, extra=call.weight.nbytes)  # rms_norm's, and magnitude, maximum, multiply
    return least._replace(writes=sum(spec.nbytes for spec in outputs(call).values()))


def bucket(call: Call) -> Bucket:
    found = rows.bucket_rows(call.x)
    return found._replace(exact=f"{found.exact},{call.per},{call.layout},{call.format}")


def inputs(
    m: int, n: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none", batch: int = 0,
    eps: float = 1e-6, offset: float = 0.0, per: str = "token", scales: str = "row", pow2: bool = False,
    format: str = "e4m3", device: str = "cuda", seed: int = 0,
) -> dict[str, Tensor | float | str | bool]:  # fmt: skip
    """`layout` is x's, `scales` that of the scales."""
    g = draw.generator(seed, device)
    x, weight = rows.draw(m, n, dtype, g, layout, special, batch), draw.vector(n, dtype, g)
    choices = {"per": per, "layout": scales, "pow2": pow2, "format": format}
    return {"x": x, "weight": weight, "eps": eps, "offset": offset, **choices}


def quantised_torch(y: Tensor, per: str, layout: str, pow2: bool, format: str) -> tuple[Tensor, Tensor]:
    """What a user would write after a norm: values in fp8, scales in fp32, laid out as asked."""
    values, scales = formats.quantized(y.float(), per, format, pow2)
    if layout == "column":
        spec = formats.outputs(TensorSpec.of(y, aligned=True), per, layout, format)["scales"]
        scales = torch.empty_strided(spec.shape, spec.strides, dtype=scales.dtype, device=y.device).copy_(scales)
    return values.to(DTYPES[format]), scales


def _torch(
    x: Tensor, weight: Tensor, eps: float, offset: float, per: str, layout: str, pow2: bool, format: str
) -> tuple[Tensor, Tensor]:
    y = F.rms_norm(x.float(), weight.shape, norms.shifted(weight, offset).float(), eps)
    return quantised_torch(y, per, layout, pow2, format)


@op(
    check=check, outputs=outputs, cost=_cost, bucket=bucket, inputs=inputs, allowed=formats.ALLOWED,
    runtime=("eps", "offset"), check_runtime=norms.check_eps,
    kernels={
        "numba": "tilery.ops.norms.numba.forward:rms_norm_fp8",
        "triton": "tilery.ops.norms.triton.forward:rms_norm_fp8",
        "cuda": "cuda_kernels:rms_norm_fp8",
    },
    first=rows.cuda_first(8192),
    baselines=baselines(torch=_torch, compile=Compiled(_torch)),
    model_sizes=lambda model: [{"n": model.hidden_size}],
    cases={"test": norms.fp8_cases(), **norms.fp8_bench_cases()},
)  # fmt: skip
def rms_norm_fp8(
    x: Tensor, weight: Tensor, eps: float = 1e-6, offset: float = 0.0, per: str = "token", layout: str = "row",
    pow2: bool = False, format: str = "e4m3",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(values, scales): rms_norm(x, weight, eps, offset) as fp8 times scales, not rounded in between;
    x, values [..., N], weight [N], scales [M, 1] per token or [M, ceil(N / 128)] per group."""
    return formats.quantized(rms_norm.reference(x, weight, eps, offset), per, format, pow2)
