import torch
from torch import Tensor

from tilery.base.spec import Bucket, Cost, TensorSpec, case
from tilery.core import inputs as draw
from tilery.core.op import op
from tilery.core.peers import Compiled, Saved, baselines
from tilery.parts import norms, rows


def check(dy: TensorSpec, x: TensorSpec, weight: TensorSpec) -> None:
    rows.check_rows("x", x, norms.ALLOWED, levels=2)
    rows.check_rows("dy", dy, norms.ALLOWED)
    rows.check_like("dy", dy, "x", x)
    norms.check_vector("weight", weight, x)


def outputs(dy: TensorSpec, x: TensorSpec, weight: TensorSpec) -> tuple[TensorSpec, ...]:
    return norms.contiguous(x), norms.contiguous(weight)


def cost(dy: TensorSpec, x: TensorSpec, weight: TensorSpec) -> Cost:
    reads = rows.cost_rows(x, flops=11, reads=2, extra=weight.nbytes)
    return reads._replace(writes=reads.writes + weight.nbytes)


def bucket(dy: TensorSpec, x: TensorSpec, weight: TensorSpec) -> Bucket:
    return rows.bucket_rows(x)


def inputs(
    m: int, n: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none", batch: int = 0,
    heads: int = 0, eps: float = 1e-6, offset: float = 0.0, device: str = "cuda", seed: int = 0,
) -> dict[str, Tensor | float]:  # fmt: skip
    g = draw.generator(seed, device)
    x = norms.draw_rows(m, n, dtype, g, layout, special, batch, heads)
    dy = norms.draw_rows(m * max(heads, 1), n, dtype, g, "contiguous", "none", batch).view(x.shape)
    return {"dy": dy, "x": x, "weight": draw.vector(n, dtype, g), "eps": eps, "offset": offset}


_saved_rstd = Saved(lambda x, eps: torch.ops.aten._fused_rms_norm(x, x.shape[-1:], None, eps)[1])


def torch_backward(dy: Tensor, x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """torch's own, which it has on a GPU alone; on a CPU autograd takes longer than the formula."""
    if not x.is_cuda:
        return formula(dy, x, weight, eps, offset)
    shape, shifted, wanted = weight.shape, norms.shifted(weight, offset), [True, True]
    dx, dweight = torch.ops.aten._fused_rms_norm_backward(dy, x, shape, _saved_rstd(x, eps), shifted, wanted)
    return dx, dweight


def formula(dy: Tensor, x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    dx, dweight = _gradients(dy.float(), x.float(), weight.float(), eps, offset)
    return dx.to(x.dtype), dweight.to(weight.dtype)


def _gradients(dy: Tensor, x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    normal, scaled = x * rstd, dy * (weight + offset)
    dx = rstd * (scaled - normal * (scaled * normal).mean(-1, keepdim=True))
    return dx, (dy * normal).reshape(x.shape[:-1].numel(), x.shape[-1]).sum(0)


@op(
    check=check, outputs=outputs, cost=cost, bucket=bucket, inputs=inputs, allowed=norms.ALLOWED,
    runtime=("eps", "offset"), check_runtime=norms.check_eps, kernels=("numba", "triton"),
    baselines=baselines(torch=torch_backward, compile=Compiled(formula)),
    model_sizes=lambda model: [{"n": model.hidden_size}],
    cases={
        "test": [*norms.backward_cases(), case(m=3, n=64, dtype="fp32", heads=4, offset=1.0)],
        **rows.bench_cases(),
    },
)  # fmt: skip
def rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """Gradients of rms_norm: (dx, dweight), with x̂ = x · rstd and g = dy · (weight + offset):
    dx = rstd · (g - x̂ · mean(g · x̂)), dweight = Σ dy · x̂ over rows; dy, x, dx [..., N], weight, dweight [N]."""
    return _gradients(dy, x, weight, eps, offset)
