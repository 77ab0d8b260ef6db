"""Contracts of rms_norm and rms_norm_backward."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tilery.base.spec import Bucket, Cost, TensorSpec, case
from tilery.core import inputs as draw
from tilery.core.call import Call
from tilery.core.op import op
from tilery.core.peers import Compiled, Saved, baselines, load
from tilery.ops.norms import contract as norms
from tilery.ops.rows import contract as rows

# Backward


def _check_backward(call: Call) -> None:
    rows.check_rows("x", call.x, norms.ALLOWED, levels=2)
    rows.check_rows("dy", call.dy, norms.ALLOWED)
    rows.check_like("dy", call.dy, "x", call.x)
    norms.check_vector("weight", call.weight, call.x)


def _backward_outputs(call: Call) -> dict[str, TensorSpec]:
    return {"dx": rows.like(call.x), "dweight": rows.like(call.weight)}


def _backward_cost(call: Call) -> Cost:
    least = rows.cost_rows(call.x, flops=11, reads=2, extra=call.weight.nbytes)
    return least._replace(writes=least.writes + call.weight.nbytes)


def _bucket(call: Call) -> Bucket:
    return rows.bucket_rows(call.x)


def _backward_inputs(
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
        return _backward_formula(dy, x, weight, eps, offset)
    shape, shifted, wanted = weight.shape, norms.shifted(weight, offset), [True, True]
    dx, dweight = torch.ops.aten._fused_rms_norm_backward(dy, x, shape, _saved_rstd(x, eps), shifted, wanted)
    return dx, dweight


def _backward_formula(dy: Tensor, x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    dx, dweight = _gradients(dy.float(), x.float(), weight.float(), eps, offset)
    return dx.to(x.dtype), dweight.to(weight.dtype)


def _gradients(dy: Tensor, x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    normal, scaled = x * rstd, dy * (weight + offset)
    dx = rstd * (scaled - normal * (scaled * normal).mean(-1, keepdim=True))
    return dx, (dy * normal).reshape(x.shape[:-1].numel(), x.shape[-1]).sum(0)


@op(
    check=_check_backward, outputs=_backward_outputs, cost=_backward_cost, bucket=_bucket, inputs=_backward_inputs,
    allowed=norms.ALLOWED, runtime=("eps", "offset"), check_runtime=norms.check_eps,
    kernels={
        "numba": "tilery.ops.norms.numba.backward:rms_norm_backward",
        "triton": "tilery.ops.norms.triton.backward:rms_norm_backward",
    },
    baselines=baselines(torch=torch_backward, compile=Compiled(_backward_formula)),
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


# Forward


def _check(call: Call) -> None:
    rows.check_rows("x", call.x, norms.ALLOWED, levels=2)
    norms.check_vector("weight", call.weight, call.x)


def _outputs(call: Call) -> dict[str, TensorSpec]:
    return {"y": rows.like(call.x)}


def _cost(call: Call) -> Cost:
    return rows.cost_rows(call.x, flops=4, extra=call.weight.nbytes)


def _inputs(
    m: int, n: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none", batch: int = 0,
    heads: int = 0, eps: float = 1e-6, offset: float = 0.0, device: str = "cuda", seed: int = 0,
) -> dict[str, Tensor | float]:  # fmt: skip
    g = draw.generator(seed, device)
    x = norms.draw_rows(m, n, dtype, g, layout, special, batch, heads)
    return {"x": x, "weight": draw.vector(n, dtype, g), "eps": eps, "offset": offset}


def _torch(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    return F.rms_norm(x, weight.shape, norms.shifted(weight, offset), eps)


def _backward(call: Call, grads: Call) -> dict[str, Tensor]:
    dx, dweight = rms_norm_backward(grads.y, call.x, call.weight, call.eps, call.offset)
    return {"x": dx, "weight": dweight}


@op(
    check=_check, outputs=_outputs, cost=_cost, bucket=_bucket, inputs=_inputs, allowed=norms.ALLOWED,
    runtime=("eps", "offset"), check_runtime=norms.check_eps,
    kernels={
        "numba": "tilery.ops.norms.numba.forward:rms_norm",
        "triton": "tilery.ops.norms.triton.forward:rms_norm",
        "cutile": "cutile_kernels:rms_norm", "cuda": "cuda_kernels:rms_norm", "tilelang": "tilelang_kernels:rms_norm",
        "cupy": "cupy_kernels:rms_norm", "numba_cuda": "numba_cuda_kernels:rms_norm",
    },
    first=rows.cuda_first(16384, many=131072),
    baselines=baselines(
        torch=_torch, compile=Compiled(_torch),
        liger=lambda *args: load("liger_kernel.ops").LigerRMSNormFunction.apply(*args),
        tilegym=lambda x, w, eps, offset: load("tilegym.ops").rms_norm(x, w.shape, w, eps, offset=offset),
        quack=lambda x, w, eps, offset: load("quack").rmsnorm(x, norms.shifted(w, offset), eps=eps),
        flashinfer=lambda x, w, eps, offset: load("flashinfer").rmsnorm(x, norms.shifted(w, offset), eps),
    ),
    backward=_backward,
    model_sizes=lambda model: [{"n": model.hidden_size}],
    cases={"test": norms.rms_cases(heads=True, refused_by={"tilelang": "row of 65537"}), **rows.bench_cases()},
)  # fmt: skip
def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, offset: float = 0.0) -> Tensor:
    """RMS norm of each row: y = x / sqrt(mean(x²) + eps) · (weight + offset); x, y [..., N], weight [N]."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (weight + offset)
