"""Contracts of add_rms_norm and add_rms_norm_backward."""

import torch.nn.functional as F
from torch import Tensor

from tilery.base.spec import Bucket, Cost, TensorSpec, case
from tilery.core import inputs as draw
from tilery.core.call import Call
from tilery.core.op import op
from tilery.core.peers import Compiled, baselines, load
from tilery.ops.norms import contract as norms
from tilery.ops.norms.rms_norm import rms_norm, rms_norm_backward, torch_backward
from tilery.ops.rows import contract as rows

# Backward


def _check_backward(call: Call) -> None:
    rows.check_rows("residual_out", call.residual_out, norms.ALLOWED)
    for name, spec in (("dy", call.dy), ("dresidual", call.dresidual)):
        if spec is not None:
            rows.check_rows(name, spec, norms.ALLOWED)
            rows.check_like(name, spec, "residual_out", call.residual_out)
    norms.check_vector("weight", call.weight, call.residual_out)


def _backward_outputs(call: Call) -> dict[str, TensorSpec]:
    return {"dx": rows.like(call.residual_out), "dweight": rows.like(call.weight)}


def _backward_cost(call: Call) -> Cost:
    reads = 2 if call.dresidual is None else 3
    least = rows.cost_rows(call.residual_out, flops=12, reads=reads, extra=call.weight.nbytes)
    return least._replace(writes=least.writes + call.weight.nbytes)


def _backward_bucket(call: Call) -> Bucket:
    return rows.bucket_rows(call.residual_out)


def _backward_inputs(
    m: int, n: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none", batch: int = 0,
    passed: bool = True, eps: float = 1e-6, offset: float = 0.0, device: str = "cuda", seed: int = 0,
) -> dict[str, Tensor | float | None]:  # fmt: skip
    """`passed`: the residual has a gradient of its own."""
    g = draw.generator(seed, device)
    dy = rows.draw(m, n, dtype, g, "contiguous", "none", batch)
    dresidual = rows.draw(m, n, dtype, g, "contiguous", "none", batch) if passed else None
    total = rows.draw(m, n, dtype, g, layout, special, batch)
    weight = draw.vector(n, dtype, g)
    return {
        "dy": dy, "dresidual": dresidual, "residual_out": total, "weight": weight, "eps": eps, "offset": offset
    }  # fmt: skip


def _torch_backward(
    dy: Tensor, dresidual: Tensor | None, residual_out: Tensor, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    dx, dweight = torch_backward(dy, residual_out, weight, eps, offset)
    return (dx if dresidual is None else dx.add_(dresidual)), dweight


def _backward_formula(
    dy: Tensor, dresidual: Tensor | None, residual_out: Tensor, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    dx, dweight = _gradients(
        dy.float(), dresidual if dresidual is None else dresidual.float(), residual_out.float(), weight.float(),
        eps, offset,
    )  # fmt: skip
    return dx.to(residual_out.dtype), dweight.to(weight.dtype)


def _gradients(
    dy: Tensor, dresidual: Tensor | None, residual_out: Tensor, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    dx, dweight = rms_norm_backward.reference(dy, residual_out, weight, eps, offset)
    return (dx if dresidual is None else dx + dresidual), dweight


@op(
    check=_check_backward, outputs=_backward_outputs, cost=_backward_cost, bucket=_backward_bucket,
    inputs=_backward_inputs, allowed=norms.ALLOWED, runtime=("eps", "offset"), check_runtime=norms.check_eps,
    kernels={
        "numba": "tilery.ops.norms.numba.backward:add_rms_norm_backward",
        "triton": "tilery.ops.norms.triton.backward:add_rms_norm_backward",
    },
    baselines=baselines(torch=_torch_backward, compile=Compiled(_backward_formula)),
    model_sizes=lambda model: [{"n": model.hidden_size}],
    cases={
        "test": [*norms.backward_cases(), case(m=3, n=96, dtype="fp32", passed=False, offset=1.0)],
        **rows.bench_cases(),
    },
)  # fmt: skip
def add_rms_norm_backward(
    dy: Tensor, dresidual: Tensor | None, residual_out: Tensor, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    """Gradients of add_rms_norm: (dx, dweight), dx = dresidual + the gradient of the norm of residual_out; dx is that
    of x and of the residual alike; dy, dresidual, residual_out, dx [..., N], weight, dweight [N]."""
    return _gradients(dy, dresidual, residual_out, weight, eps, offset)


# Forward


def _check(call: Call) -> None:
    rows.check_rows("x", call.x, norms.ALLOWED)
    norms.check_residual(call)
    norms.check_vector("weight", call.weight, call.x)


def _outputs(call: Call) -> dict[str, TensorSpec]:
    return {"y": rows.like(call.x), "residual_out": rows.like(call.x)}


def _cost(call: Call) -> Cost:
    return rows.cost_rows(call.x, flops=5, reads=2, writes=2, extra=call.weight.nbytes)


def _bucket(call: Call) -> Bucket:
    return rows.bucket_rows(call.x)


def _inputs(
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


def _backward(call: Call, grads: Call) -> dict[str, Tensor | None]:
    if grads.y is None:
        return {"x": grads.residual_out, "residual": grads.residual_out}
    dx, dweight = add_rms_norm_backward(
        grads.y, grads.residual_out, call.residual_out, call.weight, call.eps, call.offset
    )
    return {"x": dx, "residual": dx, "weight": dweight}


@op(
    check=_check, outputs=_outputs, cost=_cost, bucket=_bucket, inputs=_inputs, allowed=norms.ALLOWED,
    rounds_between=True, runtime=("eps", "offset"), check_runtime=norms.check_eps,
    kernels={
        "numba": "tilery.ops.norms.numba.forward:add_rms_norm",
        "triton": "tilery.ops.norms.triton.forward:add_rms_norm",
        "cuda": "cuda_kernels:add_rms_norm",
    },
    first=rows.cuda_first(16384),
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
