"""Contracts of layer_norm and layer_norm_backward."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tilery.base.spec import Bucket, Cost, TensorSpec
from tilery.core import inputs as draw
from tilery.core.call import Call
from tilery.core.op import op
from tilery.core.peers import Compiled, Saved, baselines, load
from tilery.ops.norms import contract as norms
from tilery.ops.rows import contract as rows

# Backward


def _check_backward(call: Call) -> None:
    rows.check_rows("x", call.x, norms.ALLOWED)
    rows.check_rows("dy", call.dy, norms.ALLOWED)
    rows.check_like("dy", call.dy, "x", call.x)
    norms.check_vector("weight", call.weight, call.x)


def _backward_outputs(call: Call) -> dict[str, TensorSpec]:
    return {"dx": rows.like(call.x), "dweight": rows.like(call.weight), "dbias": rows.like(call.weight)}


def _backward_cost(call: Call) -> Cost:
    least = rows.cost_rows(call.x, flops=16, reads=2, extra=call.weight.nbytes)
    return least._replace(writes=least.writes + 2 * call.weight.nbytes)


def _bucket(call: Call) -> Bucket:
    return rows.bucket_rows(call.x)


def _backward_inputs(
    m: int, n: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none", batch: int = 0,
    eps: float = 1e-5, device: str = "cuda", seed: int = 0,
) -> dict[str, Tensor | float]:  # fmt: skip
    g = draw.generator(seed, device)
    dy = rows.draw(m, n, dtype, g, "contiguous", "none", batch)
    x = rows.draw(m, n, dtype, g, layout, special, batch)
    return {"dy": dy, "x": x, "weight": draw.vector(n, dtype, g), "eps": eps}


_saved = Saved(lambda x, eps: torch.ops.aten.native_layer_norm(x, x.shape[-1:], None, None, eps)[1:])


def _torch_backward(dy: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    mean, rstd = _saved(x, eps)
    bias, wanted = weight, [True, True, True]  # of the bias it reads the shape alone
    dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
        dy, x, weight.shape, mean, rstd, weight, bias, wanted
    )
    return dx, dweight, dbias


def _backward_formula(dy: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    dx, dweight, dbias = _gradients(dy.float(), x.float(), weight.float(), eps)
    return dx.to(x.dtype), dweight.to(weight.dtype), dbias.to(weight.dtype)


def _gradients(dy: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    centred = x - x.mean(-1, keepdim=True)
    rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    normal, scaled = centred * rstd, dy * weight
    projection = normal * (scaled * normal).mean(-1, keepdim=True) + scaled.mean(-1, keepdim=True)
    flat = x.shape[:-1].numel(), x.shape[-1]
    return rstd * (scaled - projection), (dy * normal).reshape(flat).sum(0), dy.reshape(flat).sum(0)


@op(
    check=_check_backward, outputs=_backward_outputs, cost=_backward_cost, bucket=_bucket, inputs=_backward_inputs,
    allowed=norms.ALLOWED, runtime=("eps",), check_runtime=norms.check_eps,
    kernels={
        "numba": "tilery.ops.norms.numba.backward:layer_norm_backward",
        "triton": "tilery.ops.norms.triton.backward:layer_norm_backward",
    },
    baselines=baselines(torch=_torch_backward, compile=Compiled(_backward_formula)),
    model_sizes=lambda model: [{"n": model.hidden_size}],
    cases={"test": norms.backward_cases(), **rows.bench_cases()},
)  # fmt: skip
def layer_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of layer_norm: (dx, dweight, dbias), with x̂ = (x - mean(x)) · rstd and g = dy · weight:
    dx = rstd · (g - x̂ · mean(g · x̂) - mean(g)), dweight = Σ dy · x̂ and dbias = Σ dy over rows;
    dy, x, dx [..., N], weight, dweight, dbias [N]."""
    return _gradients(dy, x, weight, eps)


# Forward


def _check(call: Call) -> None:
    rows.check_rows("x", call.x, norms.ALLOWED)
    norms.check_vector("weight", call.weight, call.x)
    norms.check_vector("bias", call.bias, call.x)


def _outputs(call: Call) -> dict[str, TensorSpec]:
    return {"y": rows.like(call.x)}


def _cost(call: Call) -> Cost:
    return rows.cost_rows(call.x, flops=7, extra=call.weight.nbytes + call.bias.nbytes)


def _inputs(
    m: int, n: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none", batch: int = 0,
    eps: float = 1e-5, device: str = "cuda", seed: int = 0,
) -> dict[str, Tensor | float]:  # fmt: skip
    g = draw.generator(seed, device)
    x = rows.draw(m, n, dtype, g, layout, special, batch)
    return {"x": x, "weight": draw.vector(n, dtype, g), "bias": draw.vector(n, dtype, g), "eps": eps}


def _torch(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def _backward(call: Call, grads: Call) -> dict[str, Tensor]:
    dx, dweight, dbias = layer_norm_backward(grads.y, call.x, call.weight, call.eps)
    return {"x": dx, "weight": dweight, "bias": dbias}


@op(
    check=_check, outputs=_outputs, cost=_cost, bucket=_bucket, inputs=_inputs, allowed=norms.ALLOWED,
    runtime=("eps",), check_runtime=norms.check_eps,
    kernels={
        "numba": "tilery.ops.norms.numba.forward:layer_norm",
        "triton": "tilery.ops.norms.triton.forward:layer_norm",
    },
    baselines=baselines(
        torch=_torch, compile=Compiled(_torch),
        liger=lambda *args: load("liger_kernel.ops").LigerLayerNormFunction.apply(*args),
        tilegym=lambda x, w, b, eps: load("tilegym.ops").layer_norm(x, x.dim() - 1, x.dim(), w, b, eps),
    ),
    backward=_backward,
    model_sizes=lambda model: [{"n": model.hidden_size}],
    cases={"test": [*rows.cases(), *norms.eps_cases()], **rows.bench_cases()},
)  # fmt: skip
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """Layer norm of each row: y = (x - mean(x)) / sqrt(var(x) + eps) · weight + bias; x, y [..., N], the others [N]."""
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight + bias
