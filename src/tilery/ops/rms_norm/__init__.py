import torch
import torch.nn.functional as F
from torch import Tensor

from tilery import inputs as draw
from tilery.errors import require
from tilery.op import op
from tilery.ops import rows
from tilery.peers import Compiled, baselines, load
from tilery.spec import Bucket, Cost, TensorSpec, dtype_name

# Rounding the result to bf16 alone costs 1.7e-3, to fp16 2.1e-4.
ALLOWED = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}


def check(x: TensorSpec, weight: TensorSpec) -> None:
    rows.check_rows("x", x, ALLOWED)
    n = x.shape[-1]
    require(weight.shape == (n,), f"weight must be [{n}] as x's rows are, got {list(weight.shape)}")
    require(weight.stride(0) == 1 or n <= 1, f"weight must be contiguous, got stride {weight.stride(0)}")
    require(weight.dtype == x.dtype, f"weight must be {dtype_name(x.dtype)} as x is, got {dtype_name(weight.dtype)}")


def outputs(x: TensorSpec, weight: TensorSpec) -> tuple[TensorSpec, ...]:
    return (TensorSpec.contiguous(x.shape, x.dtype, x.device),)


def cost(x: TensorSpec, weight: TensorSpec) -> Cost:
    return rows.cost_rows(x, flops=4, extra=weight.nbytes)


def bucket(x: TensorSpec, weight: TensorSpec) -> Bucket:
    return rows.bucket_rows(x)


def inputs(
    m: int, n: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none", batch: int = 0,
    device: str = "cuda", seed: int = 0,
) -> dict[str, Tensor]:  # fmt: skip
    g = draw.generator(seed, device)
    return {"x": rows.draw(m, n, dtype, g, layout, special, batch), "weight": draw.vector(n, dtype, g)}


def _torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


@op(
    check=check, outputs=outputs, cost=cost, bucket=bucket, inputs=inputs, allowed=ALLOWED, runtime=("eps",),
    kernels=("numba", "triton", "cutile", "cuda", "tilelang", "cupy", "numba_cuda"),
    baselines=baselines(
        torch=_torch, compile=Compiled(_torch),
        liger=lambda x, weight, eps: load("liger_kernel.ops").LigerRMSNormFunction.apply(x, weight, eps),
        tilegym=lambda x, weight, eps: load("tilegym.ops").rms_norm(x, weight.shape, weight, eps),
        quack=lambda x, weight, eps: load("quack").rmsnorm(x, weight, eps=eps),
        flashinfer=lambda x, weight, eps: load("flashinfer").rmsnorm(x, weight, eps),
    ),
    model_sizes=lambda model: [{"n": model.hidden_size}],
    cases={"test": rows.cases(refused_by={"triton": "row of 65537", "tilelang": "row of 65537"}), **rows.bench_cases()},
)  # fmt: skip
def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """RMS norm of each row: y = x / sqrt(mean(x²) + eps) · weight; x, y [..., N], weight [N]."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
