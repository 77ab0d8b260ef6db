import torch
import torch.nn.functional as F
from torch import Tensor

from tilery.base.spec import Bucket, Cost, TensorSpec
from tilery.core import inputs as draw
from tilery.core.op import op
from tilery.core.peers import Compiled, baselines, load
from tilery.ops.layer_norm_backward import layer_norm_backward
from tilery.parts import norms, rows


def check(x: TensorSpec, weight: TensorSpec, bias: TensorSpec) -> None:
    rows.check_rows("x", x, norms.ALLOWED)
    norms.check_vector("weight", weight, x)
    norms.check_vector("bias", bias, x)


def outputs(x: TensorSpec, weight: TensorSpec, bias: TensorSpec) -> tuple[TensorSpec, ...]:
    return (norms.contiguous(x),)


def cost(x: TensorSpec, weight: TensorSpec, bias: TensorSpec) -> Cost:
    return rows.cost_rows(x, flops=7, extra=weight.nbytes + bias.nbytes)


def bucket(x: TensorSpec, weight: TensorSpec, bias: TensorSpec) -> Bucket:
    return rows.bucket_rows(x)


def inputs(
    m: int, n: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none", batch: int = 0,
    eps: float = 1e-5, device: str = "cuda", seed: int = 0,
) -> dict[str, Tensor | float]:  # fmt: skip
    g = draw.generator(seed, device)
    x = rows.draw(m, n, dtype, g, layout, special, batch)
    return {"x": x, "weight": draw.vector(n, dtype, g), "bias": draw.vector(n, dtype, g), "eps": eps}


def _torch(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, eps)


@op(
    check=check, outputs=outputs, cost=cost, bucket=bucket, inputs=inputs, allowed=norms.ALLOWED,
    runtime=("eps",), check_runtime=norms.check_eps, kernels=("numba", "triton"),
    baselines=baselines(
        torch=_torch, compile=Compiled(_torch),
        liger=lambda *args: load("liger_kernel.ops").LigerLayerNormFunction.apply(*args),
        tilegym=lambda x, w, b, eps: load("tilegym.ops").layer_norm(x, x.dim() - 1, x.dim(), w, b, eps),
    ),
    backward=lambda args, outs, grads: (*layer_norm_backward(grads[0], args[0], args[1], args[3]), None),
    model_sizes=lambda model: [{"n": model.hidden_size}],
    cases={"test": [*rows.cases(), *norms.eps_cases()], **rows.bench_cases()},
)  # fmt: skip
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """Layer norm of each row: y = (x - mean(x)) / sqrt(var(x) + eps) · weight + bias; x, y [..., N], the others [N]."""
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight + bias
