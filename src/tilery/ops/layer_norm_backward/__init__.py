import torch
from torch import Tensor

from tilery.base.spec import Bucket, Cost, TensorSpec
from tilery.core import inputs as draw
from tilery.core.op import op
from tilery.core.peers import Compiled, Saved, baselines
from tilery.parts import norms, rows


def check(dy: TensorSpec, x: TensorSpec, weight: TensorSpec) -> None:
    rows.check_rows("x", x, norms.ALLOWED)
    rows.check_rows("dy", dy, norms.ALLOWED)
    rows.check_like("dy", dy, "x", x)
    norms.check_vector("weight", weight, x)


def outputs(dy: TensorSpec, x: TensorSpec, weight: TensorSpec) -> tuple[TensorSpec, ...]:
    return norms.contiguous(x), norms.contiguous(weight), norms.contiguous(weight)


def cost(dy: TensorSpec, x: TensorSpec, weight: TensorSpec) -> Cost:
    least = rows.cost_rows(x, flops=16, reads=2, extra=weight.nbytes)
    return least._replace(writes=least.writes + 2 * weight.nbytes)


def bucket(dy: TensorSpec, x: TensorSpec, weight: TensorSpec) -> Bucket:
    return rows.bucket_rows(x)


def inputs(
    m: int, n: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none", batch: int = 0,
    eps: float = 1e-5, device: str = "cuda", seed: int = 0,
) -> dict[str, Tensor | float]:  # fmt: skip
    g = draw.generator(seed, device)
    dy = rows.draw(m, n, dtype, g, "contiguous", "none", batch)
    x = rows.draw(m, n, dtype, g, layout, special, batch)
    return {"dy": dy, "x": x, "weight": draw.vector(n, dtype, g), "eps": eps}


_saved = Saved(lambda x, eps: torch.ops.aten.native_layer_norm(x, x.shape[-1:], None, None, eps)[1:])


def _torch(dy: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    mean, rstd = _saved(x, eps)
    bias, wanted = weight, [True, True, True]  # of the bias it reads the shape alone
    dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
        dy, x, weight.shape, mean, rstd, weight, bias, wanted
    )
    return dx, dweight, dbias


def _formula(dy: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    dx, dweight, dbias = _gradients(dy.float(), x.float(), weight.float(), eps)
    return dx.to(x.dtype), dweight.to(weight.dtype), dbias.to(weight.dtype)


def _gradients(dy: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    centred = x - x.mean(-1, keepdim=True)
    rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    normal, scaled = centred * rstd, dy * weight
    share = normal * (scaled * normal).mean(-1, keepdim=True) + scaled.mean(-1, keepdim=True)
    flat = x.shape[:-1].numel(), x.shape[-1]
    return rstd * (scaled - share), (dy * normal).reshape(flat).sum(0), dy.reshape(flat).sum(0)


@op(
    check=check, outputs=outputs, cost=cost, bucket=bucket, inputs=inputs, allowed=norms.ALLOWED,
    runtime=("eps",), check_runtime=norms.check_eps, kernels=("numba", "triton"),
    baselines=baselines(torch=_torch, compile=Compiled(_formula)),
    model_sizes=lambda model: [{"n": model.hidden_size}],
    cases={"test": norms.backward_cases(), **rows.bench_cases()},
)  # fmt: skip
def layer_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of layer_norm: (dx, dweight, dbias), with x̂ = (x - mean(x)) · rstd and g = dy · weight:
    dx = rstd · (g - x̂ · mean(g · x̂) - mean(g)), dweight = Σ dy · x̂ and dbias = Σ dy over rows;
    dy, x, dx [..., N], weight, dweight, dbias [N]."""
    return _gradients(dy, x, weight, eps)
