"""Contract of topk_softmax."""

from typing import Any

import torch
from torch import Tensor

from tilery.base.errors import require
from tilery.base.rows import rows as rows_of
from tilery.base.spec import Bucket, Case, Cost, TensorSpec, case, dtype_name
from tilery.core import inputs as draw
from tilery.core.call import Call
from tilery.core.op import op
from tilery.core.peers import Compiled, baselines
from tilery.ops.rows import contract as rows
from tilery.ops.sampling.argmax import DTYPES

_MOST_EXPERTS = 1024


def _check(call: Call) -> None:
    rows.check_rows("logits", call.logits, DTYPES)
    n, k, shape = call.logits.shape[-1], call.k, list(call.logits.shape)
    require(1 <= n <= _MOST_EXPERTS, f"logits must be [..., N] with N from 1 to {_MOST_EXPERTS}, got {shape}")
    require(1 <= k <= n, f"k must be 1 to {n}, the number of experts, got {k}")


def _outputs(call: Call) -> dict[str, TensorSpec]:
    shape, device = (*call.logits.shape[:-1], call.k), call.logits.device
    return {
        "weights": TensorSpec.contiguous(shape, torch.float32, device),
        "indices": TensorSpec.contiguous(shape, torch.int32, device),
    }


def _cost(call: Call) -> Cost:
    m, n, _ = rows_of(call.logits)
    return Cost(5 * m * n, call.logits.nbytes, 8 * m * call.k)


def _bucket(call: Call) -> Bucket:
    m, n, _ = rows_of(call.logits)
    return Bucket(exact=f"n={n},k={call.k},{dtype_name(call.logits.dtype)}", scaled={"m": m})


def _inputs(
    m: int, n: int, k: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none", batch: int = 0,
    renormalize: bool = True, ties: bool = False, device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    logits = rows.draw(m, n, dtype, draw.generator(seed, device), layout, special, batch)
    return {"logits": logits.mul(2).round() if ties else logits, "k": k, "renormalize": renormalize}


def _torch(logits: Tensor, k: int, renormalize: bool) -> Any:
    weights, indices = torch.softmax(logits, -1, dtype=torch.float32).topk(k)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, indices.to(torch.int32)


def _cases() -> list[Case]:
    return [
        case(m=9, n=64, k=6, dtype="fp32"),
        case(m=9, n=64, k=6, dtype="fp16"),
        case(m=9, n=64, k=6, dtype="bf16"),
        case(m=5, n=256, k=8, dtype="bf16", renormalize=False),
        case(m=5, n=256, k=8, dtype="fp32", renormalize=False),
        case(m=3, n=1024, k=10, dtype="fp32"),
        case(m=5, n=60, k=4, dtype="fp16", renormalize=False),  # masked tail
        case(m=4, n=5, k=5, dtype="fp32"),  # all of them
        case(m=1, n=1, k=1, dtype="fp32"),
        case(m=0, n=8, k=2, dtype="fp32"),  # nothing to launch
        case(m=7, n=128, k=8, dtype="fp32", ties=True),  # the lowest index first
        case(m=7, n=128, k=8, dtype="bf16", ties=True),
        case(m=2, n=96, k=3, dtype="fp32", batch=3),  # [batch, m, n]
        case(m=5, n=32, k=2, dtype="fp16", layout="padded"),
        case(m=5, n=33, k=2, dtype="fp32", layout="misaligned"),
        case(m=3, n=32, k=4, dtype="fp16", layout="far"),  # more than 2**31 elements from first to last
        case(m=3, n=20, k=3, dtype="fp32", special="nan"),
        case(m=3, n=4, k=4, dtype="fp16", special="-inf"),  # an expert that is switched off
    ]


def _model_sizes(model: Any) -> list[dict[str, int]]:
    """Sizes of the router; a dense model has none."""
    return [{"n": model.n_routed_experts, "k": model.num_experts_per_tok}] if model.n_routed_experts else []


@op(
    check=_check, outputs=_outputs, cost=_cost, bucket=_bucket, inputs=_inputs,
    allowed={torch.float32: 1e-6, torch.int32: 0.0},
    kernels={"numba": "numba_kernels:topk_softmax", "triton": "triton_kernels:topk_softmax"},
    baselines=baselines(torch=_torch, compile=Compiled(_torch)), model_sizes=_model_sizes,
    cases={
        "test": _cases(),
        # fp32, as routers compute them: torch promises no order of equals, and bf16 has many.
        "bench": [case(m=m, n=n, k=8, dtype="fp32") for m, n in ((16, 128), (8192, 128), (8192, 256))],
        "bench_cpu": [case(m=4096, n=128, k=8, dtype="fp32")],
    },
)  # fmt: skip
def topk_softmax(logits: Tensor, k: int, renormalize: bool = True) -> tuple[Tensor, Tensor]:
    """The k largest of softmax(logits) and their indices, as a router of experts picks them: largest first.

    Of equals the lowest index comes first; NaN counts as the largest. renormalize divides the k by their sum.
    logits [..., N] with N up to 1024; weights [..., k] fp32, indices [..., k] int32.
    """
    indices = logits.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    weights = torch.softmax(logits, -1).gather(-1, indices)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, indices.to(torch.int32)
