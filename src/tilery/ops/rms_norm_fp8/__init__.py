import torch
import torch.nn.functional as F
from torch import Tensor

from tilery.base.spec import DTYPES, Bucket, Cost, TensorSpec
from tilery.core import inputs as draw
from tilery.core.op import op
from tilery.core.peers import Compiled, baselines
from tilery.ops.rms_norm import rms_norm
from tilery.parts import fp8, norms, rows


def check(x: TensorSpec, weight: TensorSpec, per: str, layout: str, pow2: bool, format: str) -> None:
    rows.check_rows("x", x, norms.ALLOWED)
    norms.check_vector("weight", weight, x)
    fp8.check(per, layout, format, among=norms.PER)


def outputs(
    x: TensorSpec, weight: TensorSpec, per: str, layout: str, pow2: bool, format: str
) -> tuple[TensorSpec, ...]:
    return fp8.specs(x, per, layout, format)


def cost(x: TensorSpec, weight: TensorSpec, per: str, layout: str, pow2: bool, format: str) -> Cost:
    made = outputs(x, weight, per, layout, pow2, format)
    least = rows.cost_rows(x, flops=7, extra=weight.nbytes)  # those of rms_norm, and magnitude, greatest, multiply
    return least._replace(writes=sum(spec.nbytes for spec in made))


def bucket(x: TensorSpec, weight: TensorSpec, per: str, layout: str, pow2: bool, format: str) -> Bucket:
    found = rows.bucket_rows(x)
    return found._replace(exact=f"{found.exact},{per},{layout},{format}")


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
    values, scales = fp8.quantised(y.float(), per, format, pow2)
    if layout == "column":
        _, spec = fp8.specs(TensorSpec.of(y, aligned=True), per, layout, format)
        scales = torch.empty_strided(spec.shape, spec.strides, dtype=scales.dtype, device=y.device).copy_(scales)
    return values.to(DTYPES[format]), scales


def _torch(
    x: Tensor, weight: Tensor, eps: float, offset: float, per: str, layout: str, pow2: bool, format: str
) -> tuple[Tensor, Tensor]:
    y = F.rms_norm(x.float(), weight.shape, norms.shifted(weight, offset).float(), eps)
    return quantised_torch(y, per, layout, pow2, format)


@op(
    check=check, outputs=outputs, cost=cost, bucket=bucket, inputs=inputs, allowed=fp8.ALLOWED,
    runtime=("eps", "offset"), check_runtime=norms.check_eps,
    kernels=("numba", "triton", "cuda"), first=rows.cuda_first(8192),
    baselines=baselines(torch=_torch, compile=Compiled(_torch)),
    model_sizes=lambda model: [{"n": model.hidden_size}],
    cases={"test": norms.fp8_cases(), **norms.fp8_bench_cases()},
)  # fmt: skip
def rms_norm_fp8(
    x: Tensor, weight: Tensor, eps: float = 1e-6, offset: float = 0.0, per: str = "token", layout: str = "row",
    pow2: bool = False, format: str = "e4m3",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(values, scales): rms_norm(x, weight, eps, offset) as fp8 times scales, not rounded in between (ops/fp8.py);
    x, values [..., N], weight [N], scales [M, 1] per token or [M, ceil(N / 128)] per group."""
    return fp8.quantised(rms_norm.reference(x, weight, eps, offset), per, format, pow2)
