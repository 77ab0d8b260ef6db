"""Contracts of cross_entropy and cross_entropy_backward."""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilery.base.rows import rows as rows_of
from tilery.base.spec import Bucket, Case, Cost, TensorSpec, case
from tilery.core import inputs as draw
from tilery.core.call import Call
from tilery.core.op import op
from tilery.core.peers import Compiled, baselines
from tilery.ops.losses import contract
from tilery.ops.losses.call import LossCall
from tilery.ops.losses.contract import TERMS
from tilery.ops.rows import contract as rows

# Backward


def _check_backward(call: LossCall) -> None:
    contract.check_logits(call.logits)
    contract.check_targets(call.targets, call.logits.shape[:-1])
    contract.check_values(call.targets, dloss=call.dloss, dlse=call.dlse, lse=call.lse)


def _backward_outputs(call: LossCall) -> dict[str, TensorSpec]:
    return {"dlogits": rows.like(call.logits)}


def _backward_cost(call: LossCall) -> Cost:
    extra = call.targets.nbytes + 3 * call.lse.nbytes
    return rows.cost_rows(call.logits, flops=4, extra=extra)  # subtract, exp, multiply, subtract


def _bucket(call: LossCall) -> Bucket:
    return rows.bucket_rows(call.logits)


def _backward_inputs(
    m: int, n: int, dtype: str = "bf16", layout: str = "contiguous", batch: int = 0,
    label_smoothing: float = 0.0, ignore_index: int = -100, z_loss: float = 0.0, ignored: bool = False,
    outside: bool = False, device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    g = draw.generator(seed, device)
    logits = rows.draw(m, n, dtype, g, layout, "none", batch)
    shape = logits.shape[:-1]
    dloss, dlse = (draw.away_from_zero(shape, g) for _ in range(2))
    return {
        "dloss": dloss, "dlse": dlse, "logits": logits, "lse": logits.float().logsumexp(-1),
        "targets": contract.draw_targets(shape, n, g, ignored, ignore_index, outside),
        "label_smoothing": label_smoothing, "ignore_index": ignore_index, "z_loss": z_loss,
    }  # fmt: skip


def _torch_backward(
    dloss: Tensor, dlse: Tensor, logits: Tensor, targets: Tensor, lse: Tensor, label_smoothing: float,
    ignore_index: int, z_loss: float,
) -> Tensor:  # fmt: skip
    """torch's own softmax, then in place: the backward of its cross_entropy knows neither dlse nor z_loss."""
    kept, n = targets != ignore_index, logits.shape[-1]
    dloss, dlse = dloss.where(kept, 0.0), dlse.where(kept, 0.0)
    scale = dloss * (1 + 2 * z_loss * lse) + dlse
    grad = torch.softmax(logits, -1).mul_(scale.unsqueeze(-1))
    if label_smoothing:
        grad.sub_((dloss * (label_smoothing / n)).unsqueeze(-1))
    at_target = (dloss * (label_smoothing - 1)).to(grad.dtype).unsqueeze(-1)
    return grad.scatter_add_(-1, targets.where(kept, 0).unsqueeze(-1), at_target)


def _backward_formula(
    dloss: Tensor, dlse: Tensor, logits: Tensor, targets: Tensor, lse: Tensor, label_smoothing: float,
    ignore_index: int, z_loss: float,
) -> Tensor:  # fmt: skip
    """For a compiler to fuse."""
    kept = (targets != ignore_index).unsqueeze(-1)
    dloss, dlse, lse = dloss.unsqueeze(-1), dlse.unsqueeze(-1), lse.unsqueeze(-1)
    grad = (logits.float() - lse).exp() * (
        dloss * (1 + 2 * z_loss * lse) + dlse
    ) - dloss * label_smoothing / logits.shape[-1]
    classes = torch.arange(logits.shape[-1], device=logits.device)
    grad = grad - (classes == targets.unsqueeze(-1)) * (dloss * (1 - label_smoothing))
    return grad.where(kept, 0.0).to(logits.dtype)


def _backward_cases() -> list[Case]:
    """Cases of the forward, but without NaN and infinities: lse holds what they make of a row."""
    found = [c for c in rows.cases() if c.params["n"] and "special" not in c.params]
    more = [
        case(m=8, n=200, dtype="fp32", outside=True, label_smoothing=1.0),
        case(m=8, n=200, dtype="bf16", outside=True, ignored=True, ignore_index=7),
        case(m=4, n=200, dtype="fp16", ignored=True, ignore_index=2**40),
    ]
    return [case(**(c.params | TERMS)) if i % 2 == 0 else c for i, c in enumerate(found)] + more


@op(
    check=_check_backward, outputs=_backward_outputs, cost=_backward_cost, bucket=_bucket, inputs=_backward_inputs,
    allowed={torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}, call_type=LossCall,
    runtime=("label_smoothing", "ignore_index", "z_loss"), check_runtime=contract.check_scalars,
    kernels={
        "numba": "numba_kernels:cross_entropy_backward",
        "triton": "tilery.ops.losses.triton.cross_entropy:cross_entropy_backward",
    },
    baselines=baselines(torch=_torch_backward, compile=Compiled(_backward_formula)),
    model_sizes=lambda model: [{"n": model.vocab_size}], indices=contract.check_indices,
    cases={
        "test": _backward_cases(),
        "bench": [case(m=m, n=n, dtype="bf16") for m, n in ((8192, 32000), (4096, 128256))],
        "bench_cpu": rows.bench_cases()["bench_cpu"],
    },
)  # fmt: skip
def cross_entropy_backward(
    dloss: Tensor, dlse: Tensor, logits: Tensor, targets: Tensor, lse: Tensor, label_smoothing: float = 0.0,
    ignore_index: int = -100, z_loss: float = 0.0,
) -> Tensor:  # fmt: skip
    """Gradient of cross_entropy: p · (dloss · (1 + 2 · z_loss · lse) + dlse) - dloss · ((1 - s) · [target] + s / N).

    p = exp(logits - lse), s = label_smoothing; rows to ignore get 0, and rows whose target is no class get NaN.
    logits and the result [..., N], the others [...].
    """
    dloss, dlse, lse, targets = (t.unsqueeze(-1) for t in (dloss, dlse, lse, targets))
    return contract.logit_gradients(dloss, dlse, logits, targets, lse, (label_smoothing, ignore_index, z_loss))


# Forward


def _check(call: LossCall) -> None:
    contract.check_logits(call.logits)
    contract.check_targets(call.targets, call.logits.shape[:-1])


def _cost(call: LossCall) -> Cost:
    m, n, _ = rows_of(call.logits)
    return Cost(4 * m * n, call.logits.nbytes + call.targets.nbytes, 2 * 4 * m)  # max, subtract, exp, sum


def _inputs(
    m: int, n: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none", batch: int = 0,
    label_smoothing: float = 0.0, ignore_index: int = -100, z_loss: float = 0.0, ignored: bool = False,
    outside: bool = False, masked: bool = False, device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """`masked`: the logits of the last row are -inf; `outside`: some targets are no class."""
    g = draw.generator(seed, device)
    logits = rows.draw(m, n, dtype, g, layout, special, batch)
    if masked:
        logits[..., -1, :] = -float("inf")
    targets = contract.draw_targets(logits.shape[:-1], n, g, ignored, ignore_index, outside)
    scalars = {"label_smoothing": label_smoothing, "ignore_index": ignore_index, "z_loss": z_loss}
    return {"logits": logits, "targets": targets, **scalars}


def _cases() -> list[Case]:
    """What every row-wise op must bear, but for rows without a class; the first of each dtype with all terms."""
    found = [c for c in rows.cases() if c.params["n"]]
    first = {c.params["dtype"]: c for c in reversed(found)}.values()
    more = [
        case(m=8, n=200, dtype="fp32", outside=True),
        case(m=8, n=200, dtype="bf16", outside=True, ignored=True, ignore_index=7),
        case(m=4, n=200, dtype="fp16", ignored=True, ignore_index=2**40, label_smoothing=1.0),
        case(m=5, n=200, dtype="fp32", masked=True, label_smoothing=0.1),  # lse is -inf
        case(m=5, n=200, dtype="bf16", masked=True),
        # More rows than READ_IGNORED_UP_TO: each waits for its target. In bf16, since the interpreter, which would take
        # long for so many programs, refuses it.
        case(m=1100, n=20, dtype="bf16", ignored=True, outside=True),
    ]
    return [replace(c, params=c.params | TERMS) if any(c is f for f in first) else c for c in found] + more


def _bench_cases() -> dict[str, list[Case]]:
    """Vocabularies of Llama 2, Llama 3 and Qwen 3."""
    return {
        "bench": [case(m=m, n=n, dtype="bf16") for m, n in ((8192, 32000), (4096, 128256), (4096, 151936))],
        "bench_cpu": rows.bench_cases()["bench_cpu"],
    }


def _torch(logits: Tensor, targets: Tensor, label_smoothing: float, ignore_index: int, z_loss: float) -> Any:
    """It gives no lse, and answers in the logits' dtype."""
    if z_loss:
        raise NotImplementedError("F.cross_entropy has no z_loss")
    flat, shape = logits.reshape(-1, logits.shape[-1]), targets.shape
    how = {"reduction": "none", "label_smoothing": label_smoothing, "ignore_index": ignore_index}
    return F.cross_entropy(flat, targets.reshape(-1), **how).view(shape), None  # type: ignore[arg-type]


def _formula(logits: Tensor, targets: Tensor, label_smoothing: float, ignore_index: int, z_loss: float) -> Any:
    """For a compiler to fuse."""
    return contract.fused_formula(logits.float(), targets, label_smoothing, ignore_index, z_loss)


def _backward(call: LossCall, grads: Call) -> dict[str, Tensor]:
    dloss, dlse = contract.output_gradients(call, grads)
    scalars = (call.label_smoothing, call.ignore_index, call.z_loss)
    return {"logits": cross_entropy_backward(dloss, dlse, call.logits, call.targets, call.lse, *scalars)}


def _first(call: LossCall) -> str | None:
    """Triton for few short rows: 16 × 1024 takes 1.8 µs in Triton on an H200, 2.2 in CUDA C++."""
    m, n, _ = rows_of(call.logits)
    return "triton" if call.logits.device.type == "cuda" and n <= 8192 and m * n <= 2**19 else None


@op(
    check=_check, outputs=contract.outputs, cost=_cost, bucket=_bucket, inputs=_inputs,
    allowed={torch.float32: 1e-6},  # logits of any dtype are widened
    call_type=LossCall,
    runtime=("label_smoothing", "ignore_index", "z_loss"), check_runtime=contract.check_scalars,
    kernels={
        "cuda": "cuda_kernels:cross_entropy", "numba": "numba_kernels:cross_entropy",
        "triton": "tilery.ops.losses.triton.cross_entropy:cross_entropy",
    },
    first=_first,
    # Not Liger: it gives no lse, and writes the gradient over its logits as it goes, which is another op.
    baselines=baselines(torch=_torch, compile=Compiled(_formula)),
    model_sizes=lambda model: [{"n": model.vocab_size}], indices=contract.check_indices, backward=_backward,
    cases={"test": _cases(), **_bench_cases()},
)  # fmt: skip
def cross_entropy(
    logits: Tensor, targets: Tensor, label_smoothing: float = 0.0, ignore_index: int = -100, z_loss: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Losses of rows, lse - (1 - s) · logits[target] - s · mean(logits) + z_loss · lse²; lse = log(sum(exp(logits))).

    s is label_smoothing, from 0 to 1; z_loss is 0 or more. Both results are 0 where the target is ignore_index. Where
    the target is no class, the loss and the gradient of the row are NaN. lse of a row of -inf alone is -inf.
    logits [..., N]; targets int64, losses and lse fp32 [...].
    """
    n = logits.shape[-1]
    target_logit = logits.gather(-1, targets.clamp(0, n - 1).unsqueeze(-1)).squeeze(-1)
    scalars = (label_smoothing, ignore_index, z_loss)
    return contract.losses(logits.logsumexp(-1), target_logit, logits.mean(-1), targets, n, scalars)
