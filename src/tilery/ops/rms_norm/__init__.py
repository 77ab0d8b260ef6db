import torch
import torch.nn.functional as F
from torch import Tensor

from tilery.base.spec import Bucket, Cost, TensorSpec
from tilery.core import inputs as draw
from tilery.core.op import op
from tilery.core.peers import Compiled, baselines, load
from tilery.ops.rms_norm_backward import rms_norm_backward
from tilery.parts import norms, rows


def check(x: TensorSpec, weight: TensorSpec) -> None:
    rows.check_rows("x", x, norms.ALLOWED, levels=2)
    norms.check_vector("weight", weight, x)


def outputs(x: TensorSpec, weight: TensorSpec) -> tuple[TensorSpec, ...]:
    return (norms.contiguous(x),)


def cost(x: TensorSpec, weight: TensorSpec) -> Cost:
    return rows.cost_rows(x, flops=4, extra=weight.nbytes)


def bucket(x: TensorSpec, weight: TensorSpec) -> Bucket:
    return rows.bucket_rows(x)


def inputs(
    m: int, n: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none", batch: int = 0,
    heads: int = 0, eps: float = 1e-6, offset: float = 0.0, device: str = "cuda", seed: int = 0,
) -> dict[str, Tensor | float]:  # fmt: skip
    g = draw.generator(seed, device)
    x = norms.draw_rows(m, n, dtype, g, layout, special, batch, heads)
    return {"x": x, "weight": draw.vector(n, dtype, g), "eps": eps, "offset": offset}


def _torch(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    return F.rms_norm(x, weight.shape, norms.shifted(weight, offset), eps)


@op(
    check=check, outputs=outputs, cost=cost, bucket=bucket, inputs=inputs, allowed=norms.ALLOWED,
    runtime=("eps", "offset"), check_runtime=norms.check_eps,
    kernels=("numba", "triton", "cutile", "cuda", "tilelang", "cupy", "numba_cuda"),
    first=rows.cuda_first(16384, many=131072),
    baselines=baselines(
        torch=_torch, compile=Compiled(_torch),
        liger=lambda *args: load("liger_kernel.ops").LigerRMSNormFunction.apply(*args),
        tilegym=lambda x, w, eps, offset: load("tilegym.ops").rms_norm(x, w.shape, w, eps, offset=offset),
        quack=lambda x, w, eps, offset: load("quack").rmsnorm(x, norms.shifted(w, offset), eps=eps),
        flashinfer=lambda x, w, eps, offset: load("flashinfer").rmsnorm(x, norms.shifted(w, offset), eps),
    ),
    backward=lambda args, outs, grads: (*rms_norm_backward(grads[0], *args), None, None),
    model_sizes=lambda model: [{"n": model.hidden_size}],
    cases={"test": norms.rms_cases(heads=True, refused_by={"tilelang": "row of 65537"}), **rows.bench_cases()},
)  # fmt: skip
def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, offset: float = 0.0) -> Tensor:
    """RMS norm of each row: y = x / sqrt(mean(x²) + eps) · (weight + offset); x, y [..., N], weight [N]."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (weight + offset)
