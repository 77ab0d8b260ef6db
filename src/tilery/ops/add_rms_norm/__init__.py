import torch.nn.functional as F
from torch import Tensor

from tilery.base.spec import Bucket, Cost, TensorSpec
from tilery.core import inputs as draw
from tilery.core.op import op
from tilery.core.peers import Compiled, baselines, load
from tilery.ops.add_rms_norm_backward import add_rms_norm_backward
from tilery.ops.rms_norm import rms_norm
from tilery.parts import norms, rows


def check(x: TensorSpec, residual: TensorSpec, weight: TensorSpec) -> None:
    rows.check_rows("x", x, norms.ALLOWED)
    rows.check_rows("residual", residual, norms.ALLOWED)
    rows.check_like("residual", residual, "x", x)
    norms.check_vector("weight", weight, x)


def outputs(x: TensorSpec, residual: TensorSpec, weight: TensorSpec) -> tuple[TensorSpec, ...]:
    return norms.contiguous(x), norms.contiguous(x)


def cost(x: TensorSpec, residual: TensorSpec, weight: TensorSpec) -> Cost:
    return rows.cost_rows(x, flops=5, reads=2, writes=2, extra=weight.nbytes)


def bucket(x: TensorSpec, residual: TensorSpec, weight: TensorSpec) -> Bucket:
    return rows.bucket_rows(x)


def inputs(
    m: int, n: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none", batch: int = 0,
    eps: float = 1e-6, offset: float = 0.0, device: str = "cuda", seed: int = 0,
) -> dict[str, Tensor | float]:  # fmt: skip
    g = draw.generator(seed, device)
    x = rows.draw(m, n, dtype, g, layout, special, batch)
    residual = rows.draw(m, n, dtype, g, "contiguous", "none", batch)  # the two differ in row stride where layout says
    return {"x": x, "residual": residual, "weight": draw.vector(n, dtype, g), "eps": eps, "offset": offset}


def _torch(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return F.rms_norm(total, weight.shape, norms.shifted(weight, offset), eps), total


def _backward(args: tuple, outs: tuple[Tensor, ...], grads: tuple[Tensor | None, ...]) -> tuple:
    _, _, weight, eps, offset = args
    dy, dresidual = grads
    if dy is None:
        return dresidual, dresidual, None, None, None
    dx, dweight = add_rms_norm_backward(dy, dresidual, outs[1], weight, eps, offset)
    return dx, dx, dweight, None, None


@op(
    check=check, outputs=outputs, cost=cost, bucket=bucket, inputs=inputs, allowed=norms.ALLOWED, rounds_between=True,
    runtime=("eps", "offset"), check_runtime=norms.check_eps,
    kernels=("numba", "triton", "cuda"), first=rows.cuda_first(16384),
    baselines=baselines(
        torch=_torch, compile=Compiled(_torch),
        liger=lambda *args: load("liger_kernel.ops").LigerFusedAddRMSNormFunction.apply(*args),
    ),
    backward=_backward,
    model_sizes=lambda model: [{"n": model.hidden_size}],
    cases={"test": norms.rms_cases(), **rows.bench_cases()},
)  # fmt: skip
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(y, residual_out): residual_out = x + residual, rounded to its dtype as models do, and y = rms_norm(residual_out,
    weight, eps, offset); x, residual, y, residual_out [..., N], weight [N]."""
    total = x + residual
    return rms_norm.reference(total, weight, eps, offset), total
