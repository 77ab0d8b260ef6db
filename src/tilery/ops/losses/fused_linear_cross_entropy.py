"""Contracts of fused_linear_cross_entropy and fused_linear_cross_entropy_backward."""

from typing import Any

import torch
from torch import Tensor

from tilery.base.spec import Cost, TensorSpec, case
from tilery.core import inputs as draw
from tilery.core.call import Call
from tilery.core.op import op
from tilery.core.peers import Compiled, baselines
from tilery.ops.losses import contract
from tilery.ops.losses.call import LinearLossCall
from tilery.ops.rows import contract as rows

# Backward


def _check_backward(call: LinearLossCall) -> None:
    _check(call)
    contract.check_values(call.targets, dloss=call.dloss, dlse=call.dlse, lse=call.lse)


def _backward_outputs(call: LinearLossCall) -> dict[str, TensorSpec]:
    return {"dx": rows.like(call.x), "dweight": rows.like(call.weight)}


def _backward_cost(call: LinearLossCall) -> Cost:
    both = call.x.nbytes + call.weight.nbytes
    return Cost(6 * call.m * call.n * call.k, both + call.targets.nbytes + 3 * call.lse.nbytes, both)


def _backward_inputs(
    m: int, n: int, k: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none", batch: int = 0,
    label_smoothing: float = 0.0, ignore_index: int = -100, z_loss: float = 0.0, ignored: bool = False,
    outside: bool = False, device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    g = draw.generator(seed, device)
    x, weight = contract.draw_projection(m, n, k, dtype, g, layout, special, batch)
    shape = x.shape[:-1]
    dloss, dlse = (draw.away_from_zero(shape, g) for _ in range(2))
    return {
        "dloss": dloss, "dlse": dlse, "x": x, "weight": weight,
        "targets": contract.draw_targets(shape, n, g, ignored, ignore_index, outside),
        "lse": (x.float() @ weight.float().t()).logsumexp(-1),
        "label_smoothing": label_smoothing, "ignore_index": ignore_index, "z_loss": z_loss,
    }  # fmt: skip


def _torch_backward(
    dloss: Tensor, dlse: Tensor, x: Tensor, weight: Tensor, targets: Tensor, lse: Tensor, label_smoothing: float,
    ignore_index: int, z_loss: float,
) -> Any:  # fmt: skip
    logits = (x @ weight.t()).flatten(0, -2)
    dloss, dlse, lse, wanted = (t.reshape(-1, 1) for t in (dloss, dlse, lse, targets))
    is_target = torch.arange(logits.shape[-1], device=x.device) == wanted
    grad = (logits.float() - lse).exp() * (dloss * (1 + 2 * z_loss * lse) + dlse)
    grad = grad - dloss * (is_target * (1 - label_smoothing) + label_smoothing / logits.shape[-1])
    grad = grad.where(wanted != ignore_index, 0.0).to(x.dtype)
    return (grad @ weight).view(x.shape), grad.t() @ x.flatten(0, -2)


@op(
    check=_check_backward, outputs=_backward_outputs, cost=_backward_cost, bucket=contract.linear_bucket,
    inputs=_backward_inputs,
    # The gradients of the logits are rounded to the dtype of x before they are multiplied, and the products once more.
    allowed={torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}, rounds_between=True,
    call_type=LinearLossCall,
    runtime=("label_smoothing", "ignore_index", "z_loss"), check_runtime=contract.check_scalars,
    kernels={
        "numba": "numba_kernels:fused_linear_cross_entropy_backward",
        "triton": "tilery.ops.losses.triton.linear_cross_entropy:fused_linear_cross_entropy_backward",
    },
    baselines=baselines(torch=_torch_backward, compile=Compiled(_torch_backward)),
    model_sizes=lambda model: [{"n": model.vocab_size, "k": model.hidden_size}], indices=contract.check_indices,
    cases={
        "test": contract.linear_cases(),
        "bench": [case(m=m, n=128256, k=4096, dtype="bf16") for m in (1024, 4096)],
        "bench_cpu": [case(m=256, n=4096, k=512, dtype="fp32"), case(m=256, n=4096, k=512, dtype="bf16")],
    },
)  # fmt: skip
def fused_linear_cross_entropy_backward(
    dloss: Tensor, dlse: Tensor, x: Tensor, weight: Tensor, targets: Tensor, lse: Tensor,
    label_smoothing: float = 0.0, ignore_index: int = -100, z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of fused_linear_cross_entropy: dx = g · weight, dweight = gᵀ · x, g as of cross_entropy_backward.

    A target that is no class makes NaN of its row of dx, and of all of dweight, to which every row adds.
    x and dx [..., K], weight and dweight [N, K], the others [...].
    """
    rows_of_x = x.reshape(-1, x.shape[-1])
    dloss, dlse, lse, targets = (t.reshape(-1, 1) for t in (dloss, dlse, lse, targets))
    scalars = (label_smoothing, ignore_index, z_loss)
    grad = contract.logit_gradients(dloss, dlse, rows_of_x @ weight.t(), targets, lse, scalars).to(x.dtype)
    return (grad @ weight).reshape(x.shape), grad.t() @ rows_of_x


# Forward


def _check(call: LinearLossCall) -> None:
    contract.check_projection(call.x, call.weight)
    contract.check_targets(call.targets, call.x.shape[:-1])


def _cost(call: LinearLossCall) -> Cost:
    reads = call.x.nbytes + call.weight.nbytes + call.targets.nbytes
    return Cost(2 * call.m * call.n * call.k, reads, 2 * 4 * call.m)


def _inputs(
    m: int, n: int, k: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none", batch: int = 0,
    label_smoothing: float = 0.0, ignore_index: int = -100, z_loss: float = 0.0, ignored: bool = False,
    outside: bool = False, device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    g = draw.generator(seed, device)
    x, weight = contract.draw_projection(m, n, k, dtype, g, layout, special, batch)
    targets = contract.draw_targets(x.shape[:-1], n, g, ignored, ignore_index, outside)
    scalars = {"label_smoothing": label_smoothing, "ignore_index": ignore_index, "z_loss": z_loss}
    return {"x": x, "weight": weight, "targets": targets, **scalars}


def _torch(x: Tensor, weight: Tensor, targets: Tensor, label_smoothing: float, ignore_index: int, z_loss: float) -> Any:
    """Logits in fp32, as ours are: rounded ones miss the losses by 1e-4."""
    narrow = x.is_cuda and x.dtype != torch.float32
    flat = x.flatten(0, -2)
    wide = torch.mm(flat, weight.t(), out_dtype=torch.float32) if narrow else flat @ weight.t()
    return contract.fused_formula(wide.view(*x.shape[:-1], -1), targets, label_smoothing, ignore_index, z_loss)


def _backward(call: LinearLossCall, grads: Call) -> dict[str, Tensor]:
    dloss, dlse = contract.output_gradients(call, grads)
    scalars = (call.label_smoothing, call.ignore_index, call.z_loss)
    given = (dloss, dlse, call.x, call.weight, call.targets, call.lse)
    dx, dweight = fused_linear_cross_entropy_backward(*given, *scalars)
    return {"x": dx, "weight": dweight}


@op(
    check=_check, outputs=contract.outputs, cost=_cost, bucket=contract.linear_bucket, inputs=_inputs,
    allowed={torch.float32: 5e-6},  # a logit is a sum of K products
    call_type=LinearLossCall,
    runtime=("label_smoothing", "ignore_index", "z_loss"), check_runtime=contract.check_scalars,
    kernels={
        "numba": "numba_kernels:fused_linear_cross_entropy",
        "triton": "tilery.ops.losses.triton.linear_cross_entropy:fused_linear_cross_entropy",
    },
    baselines=baselines(torch=_torch, compile=Compiled(_torch)),
    model_sizes=lambda model: [{"n": model.vocab_size, "k": model.hidden_size}],
    indices=contract.check_indices, backward=_backward,
    cases={
        "test": contract.linear_cases(),
        "bench": [case(m=m, n=128256, k=4096, dtype="bf16") for m in (1024, 4096)],
        "bench_cpu": [case(m=256, n=4096, k=512, dtype="fp32")],
    },
)  # fmt: skip
def fused_linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, label_smoothing: float = 0.0, ignore_index: int = -100,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """cross_entropy of logits = x · weightᵀ that are never stored, nor rounded: its losses and lse, its scalars.

    x [..., K], weight [N, K]; targets, losses and lse [...].
    """
    n = weight.shape[0]
    logits = x @ weight.t()
    target_logit = logits.gather(-1, targets.clamp(0, n - 1).unsqueeze(-1)).squeeze(-1)
    scalars = (label_smoothing, ignore_index, z_loss)
    return contract.losses(logits.logsumexp(-1), target_logit, logits.mean(-1), targets, n, scalars)
