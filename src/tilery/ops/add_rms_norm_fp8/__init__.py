import torch.nn.functional as F
from torch import Tensor

from tilery.base.spec import Bucket, Cost, TensorSpec
from tilery.core import inputs as draw
from tilery.core.op import op
from tilery.core.peers import Compiled, baselines
from tilery.ops.rms_norm_fp8 import quantised_torch, rms_norm_fp8
from tilery.parts import fp8, norms, rows


def check(
    x: TensorSpec, residual: TensorSpec, weight: TensorSpec, per: str, layout: str, pow2: bool, format: str
) -> None:
    rows.check_rows("residual", residual, norms.ALLOWED)
    rows.check_like("residual", residual, "x", x)
    rms_norm_fp8.check(x, weight, per, layout, pow2, format)


def outputs(
    x: TensorSpec, residual: TensorSpec, weight: TensorSpec, per: str, layout: str, pow2: bool, format: str
) -> tuple[TensorSpec, ...]:
    return *fp8.specs(x, per, layout, format), norms.contiguous(x)


def cost(
    x: TensorSpec, residual: TensorSpec, weight: TensorSpec, per: str, layout: str, pow2: bool, format: str
) -> Cost:
    made = outputs(x, residual, weight, per, layout, pow2, format)
    least = rows.cost_rows(x, flops=8, reads=2, extra=weight.nbytes)
    return least._replace(writes=sum(spec.nbytes for spec in made))


def bucket(
    x: TensorSpec, residual: TensorSpec, weight: TensorSpec, per: str, layout: str, pow2: bool, format: str
) -> Bucket:
    return rms_norm_fp8.bucket(x, weight, per, layout, pow2, format)


def inputs(m: int, n: int, dtype: str = "bf16", **how: str | int | float | bool) -> dict[str, Tensor | float]:
    """As those of rms_norm_fp8, but multiples of 1/32: their sum needs no rounding in any dtype, so that the reference
    quantises the very sum that kernels do."""
    given = rms_norm_fp8.inputs(m, n, dtype, **how)
    g = draw.generator(int(how.get("seed", 0)) + 1, how.get("device", "cuda"))
    residual = rows.draw(m, n, dtype, g, "contiguous", "none", int(how.get("batch", 0)))
    for t in (given["x"], residual):
        t.copy_((t * 32).round().div(32).where(~t.isfinite() | (t.abs() < 4), 1.0))
    return {"x": given["x"], "residual": residual, **given}


def _torch(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float, per: str, layout: str, pow2: bool,
    format: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    total = x + residual
    y = F.rms_norm(total.float(), weight.shape, norms.shifted(weight, offset).float(), eps)
    return *quantised_torch(y, per, layout, pow2, format), total


@op(
    check=check, outputs=outputs, cost=cost, bucket=bucket, inputs=inputs, allowed=norms.ALLOWED | fp8.ALLOWED,
    rounds_between=True,
    runtime=("eps", "offset"), check_runtime=norms.check_eps,
    kernels=("numba", "triton", "cuda"), first=rows.cuda_first(8192),
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
    values, scales = rms_norm_fp8.reference(total, weight, eps, offset, per, layout, pow2, format)
    return values, scales, total
