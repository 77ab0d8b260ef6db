"""Contract of moe_route."""

import math
from typing import Any

import torch
from torch import Tensor

from tilery.base.errors import BadInput, require
from tilery.base.rows import rows as rows_of
from tilery.base.spec import Bucket, Case, Cost, TensorSpec, case, dtype_name
from tilery.core import inputs as draw
from tilery.core.call import Call
from tilery.core.op import op
from tilery.core.peers import Compiled, baselines
from tilery.ops.moe.call import SCORINGS
from tilery.ops.rows import contract as rows
from tilery.ops.sampling.argmax import DTYPES

_MOST_EXPERTS = 1024
_LEAST_SUM = 1e-20  # added to what renormalised weights are divided by
# Sums that rounding to fp32 might put in another order are drawn again.
_APART, _ATTEMPTS = 1e-5, 6


def _check(call: Call) -> None:
    rows.check_rows("logits", call.logits, DTYPES)
    n, k, groups, bias = call.logits.shape[-1], call.k, call.groups, call.bias
    require(
        1 <= n <= _MOST_EXPERTS,
        f"logits must be [..., N] with N from 1 to {_MOST_EXPERTS}, got {list(call.logits.shape)}",
    )
    require(call.scoring in SCORINGS, f"scoring must be one of {', '.join(SCORINGS)}, got {call.scoring!r}")
    require(
        call.scoring != "softmax_topk" or call.renormalize,
        "renormalize must be True with scoring 'softmax_topk', whose weights have the sum 1, got False",
    )
    _check_groups(n, groups)
    require(1 <= call.top_groups <= groups, f"top_groups must be 1 to groups = {groups}, got {call.top_groups}")
    most = n // groups * call.top_groups
    require(1 <= k <= most, f"k must be 1 to {most}, the experts that may be chosen, got {k}")
    if bias is not None:
        require(
            bias.dtype == torch.float32 and tuple(bias.shape) == (n,),
            f"bias must be fp32[{n}], a number for each expert, got {dtype_name(bias.dtype)}{list(bias.shape)}",
        )
        require(
            bias.stride(0) == 1 or n == 1,
            f"bias must be contiguous, got stride {bias.stride(0)}; call .contiguous() on it",
        )


def _check_groups(n: int, groups: int) -> None:
    require(
        groups == 1 or (groups > 1 and n % groups == 0 and n >= 2 * groups),
        f"groups must be 1 or divide the {n} experts into groups of 2 or more, got {groups}",
    )


def _check_runtime(scaling: float) -> None:
    if not math.isfinite(scaling):
        raise BadInput(f"scaling must be finite, got {scaling}")


def _outputs(call: Call) -> dict[str, TensorSpec]:
    shape, device = (*call.logits.shape[:-1], call.k), call.logits.device
    return {
        "weights": TensorSpec.contiguous(shape, torch.float32, device),
        "ids": TensorSpec.contiguous(shape, torch.int32, device),
    }


def _cost(call: Call) -> Cost:
    m, n, _ = rows_of(call.logits)
    bias = call.bias.nbytes if call.bias is not None else 0
    return Cost(6 * m * n, call.logits.nbytes + bias, 8 * m * call.k)


def _bucket(call: Call) -> Bucket:
    m, n, _ = rows_of(call.logits)
    how = f"{call.scoring},groups={call.groups}" + (",bias" if call.bias is not None else "")
    return Bucket(exact=f"n={n},k={call.k},{dtype_name(call.logits.dtype)},{how}", scaled={"m": m})


# The reference, in steps


def _scores(logits: Tensor, scoring: str) -> Tensor:
    if scoring == "softmax":
        return torch.softmax(logits, -1)
    return torch.sigmoid(logits) if scoring == "sigmoid" else logits


def _ranked(logits: Tensor, bias: Tensor | None, scoring: str, groups: int) -> Tensor:
    """What experts are chosen by. Scores rise with logits, which alone decide without a bias and groups."""
    if bias is None and groups == 1:
        return logits
    scores = _scores(logits, scoring)
    return scores if bias is None else scores + bias


def _group_scores(ranked: Tensor, groups: int) -> Tensor:
    return ranked.unflatten(-1, (groups, -1)).topk(2, dim=-1).values.sum(-1)


def _descending(x: Tensor) -> Tensor:
    """Indices from the largest to the least, the lower of equals first; NaN is the largest."""
    return x.sort(dim=-1, descending=True, stable=True).indices


def _order(ranked: Tensor, groups: int, top_groups: int) -> Tensor:
    """Experts of the best groups, then all others, each from the largest to the least."""
    order = _descending(ranked)
    if groups == 1:
        return order
    best = _descending(_group_scores(ranked, groups))[..., :top_groups]
    of_expert = torch.arange(ranked.shape[-1], device=ranked.device) // (ranked.shape[-1] // groups)
    chosen = (of_expert.unsqueeze(-1) == best.unsqueeze(-2)).any(-1)
    return order.gather(-1, _descending(chosen.gather(-1, order).int()))


def _weights(scores: Tensor, scoring: str, renormalize: bool, scaling: float) -> Tensor:
    if scoring == "softmax_topk":
        return torch.softmax(scores, -1) * scaling
    return scores / (scores.sum(-1, keepdim=True) + _LEAST_SUM) * scaling if renormalize else scores * scaling


# Inputs


def _closest(x: Tensor) -> Tensor:
    """The least distance of two values of a row that are not equal, in parts of the row's largest."""
    steps = x.sort(dim=-1).values.diff(dim=-1)
    return steps.masked_fill(steps == 0, math.inf).amin(-1) / x.abs().amax(-1)


def _inputs(
    m: int, n: int, k: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none", batch: int = 0,
    scoring: str = "softmax", renormalize: bool = True, groups: int = 1, top_groups: int = 1, bias: bool = False,
    scaling: float = 1.0, ties: bool = False, device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Values that experts are chosen by are equal or differ by more than rounding; `ties`: many are equal."""
    _check_groups(n, groups)
    g = draw.generator(seed, device)
    logits = rows.draw(m, n, dtype, g, layout, special, batch)
    if ties:
        logits.copy_(logits.mul(2).round())
    shift = torch.randint(-64, 65, (n,), generator=g, device=device) / 512.0 if bias else None
    if (bias or groups > 1) and n > 1:
        for _ in range(_ATTEMPTS):
            ranked = _ranked(logits.double(), None if shift is None else shift.double(), scoring, groups)
            close = _closest(ranked) < _APART
            if groups > 1:
                close |= _closest(_group_scores(ranked, groups)) < _APART
            fresh = rows.draw(m, n, dtype, g, "contiguous", "none", batch)
            fresh = fresh.mul(2).round() if ties else fresh
            logits.copy_(torch.where(close.unsqueeze(-1) & logits.isfinite(), fresh, logits))
    return {
        "logits": logits, "bias": shift, "k": k, "scoring": scoring, "renormalize": renormalize, "groups": groups,
        "top_groups": top_groups, "scaling": scaling,
    }  # fmt: skip


def _torch(
    logits: Tensor, bias: Tensor | None, k: int, scoring: str, renormalize: bool, groups: int, top_groups: int,
    scaling: float,
) -> Any:  # fmt: skip
    """As models do it: torch's topk, which promises no order of equals."""
    scores = _scores(logits.float(), scoring)
    ranked = scores if bias is None else scores + bias
    if groups > 1:
        best = _group_scores(ranked, groups).topk(top_groups, dim=-1).indices
        kept = torch.zeros_like(ranked.unflatten(-1, (groups, -1))[..., 0], dtype=torch.bool).scatter(-1, best, True)
        ranked = ranked.masked_fill(~kept.repeat_interleave(ranked.shape[-1] // groups, -1), -math.inf)
    ids = ranked.topk(k, dim=-1).indices
    return _weights(scores.gather(-1, ids), scoring, renormalize, scaling), ids.to(torch.int32)


_V3: dict[str, Any] = {"scoring": "sigmoid", "groups": 8, "top_groups": 4, "bias": True, "scaling": 2.5}


def _cases() -> list[Case]:
    return [
        case(m=9, n=64, k=6, dtype="fp32"),
        case(m=9, n=64, k=6, dtype="fp16"),
        case(m=9, n=64, k=6, dtype="bf16"),
        case(m=5, n=256, k=8, dtype="fp32", **_V3),
        case(m=5, n=256, k=8, dtype="bf16", **_V3),
        case(m=9, n=32, k=4, dtype="fp16", scoring="softmax_topk"),
        case(m=9, n=32, k=4, dtype="bf16", scoring="softmax_topk", scaling=0.3),
        case(m=5, n=60, k=4, dtype="fp16", renormalize=False),  # masked tail
        case(m=5, n=60, k=4, dtype="bf16", renormalize=False, scaling=16.0),
        case(m=5, n=100, k=7, dtype="fp32", scoring="sigmoid"),
        case(m=5, n=100, k=7, dtype="bf16", scoring="sigmoid", renormalize=False),
        case(m=6, n=48, k=5, dtype="fp32", bias=True),
        case(m=6, n=48, k=5, dtype="fp32", bias=True, scoring="softmax_topk"),
        case(m=6, n=60, k=6, dtype="fp32", groups=6, top_groups=2, scoring="sigmoid"),  # 10 in a group
        case(m=6, n=60, k=20, dtype="fp16", groups=6, top_groups=2, scoring="sigmoid", bias=True),  # all of two groups
        case(m=4, n=24, k=3, dtype="fp32", groups=12, top_groups=12),
        case(m=4, n=24, k=3, dtype="fp32", groups=3, top_groups=1, renormalize=False),
        case(m=3, n=1024, k=10, dtype="fp32"),
        case(m=4, n=5, k=5, dtype="fp32", scoring="sigmoid"),  # all of them
        case(m=1, n=1, k=1, dtype="fp32"),
        case(m=0, n=8, k=2, dtype="fp32"),  # nothing to launch
        case(m=7, n=128, k=8, dtype="fp32", ties=True),  # the lowest index first
        case(m=7, n=128, k=8, dtype="bf16", ties=True, scoring="sigmoid"),
        case(m=7, n=32, k=4, dtype="fp32", ties=True, scoring="sigmoid", groups=4, top_groups=2),
        case(m=2, n=96, k=3, dtype="fp32", batch=3),  # [batch, m, n]
        case(m=5, n=32, k=2, dtype="fp16", layout="padded"),
        case(m=5, n=33, k=2, dtype="fp32", layout="misaligned"),
        case(m=3, n=32, k=4, dtype="fp16", layout="far", scoring="sigmoid"),  # more than 2**31 elements, first to last
        case(m=3, n=20, k=3, dtype="fp32", special="nan"),
        case(m=3, n=20, k=3, dtype="fp32", special="nan", scoring="sigmoid", renormalize=False),  # NaN is the largest
        case(m=3, n=20, k=3, dtype="fp16", special="inf", scoring="sigmoid"),
        case(m=3, n=20, k=3, dtype="fp32", special="nan", scoring="sigmoid", groups=5, top_groups=2, bias=True),
        case(m=3, n=4, k=4, dtype="fp16", special="-inf"),  # an expert that is switched off
        case(m=3, n=4, k=4, dtype="fp16", special="-inf", scoring="softmax_topk"),
    ]


@op(
    check=_check, outputs=_outputs, cost=_cost, bucket=_bucket, inputs=_inputs,
    allowed={torch.float32: 1e-6, torch.int32: 0.0}, runtime=("scaling",), check_runtime=_check_runtime,
    kernels={"numba": "numba_route:moe_route", "triton": "triton_route:moe_route"},
    baselines=baselines(torch=_torch, compile=Compiled(_torch)),
    model_sizes=lambda model: (
        [{"n": model.n_routed_experts, "k": model.num_experts_per_tok}] if model.n_routed_experts else []
    ),
    cases={
        "test": _cases(),
        # fp32, as routers compute them: torch promises no order of equals, and bf16 has many.
        "bench": [
            *(case(m=m, n=128, k=8, dtype="fp32") for m in (1, 64, 4096)),
            *(case(m=m, n=256, k=8, dtype="fp32", **_V3) for m in (1, 64, 4096)),
            case(m=4096, n=32, k=4, dtype="fp32", scoring="softmax_topk"),
        ],
        "bench_cpu": [case(m=4096, n=128, k=8, dtype="fp32"), case(m=1024, n=256, k=8, dtype="fp32", **_V3)],
    },
)  # fmt: skip
def moe_route(
    logits: Tensor, bias: Tensor | None, k: int, scoring: str = "softmax", renormalize: bool = True, groups: int = 1,
    top_groups: int = 1, scaling: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Chooses k experts of each token, largest score first, and weighs them; logits [..., N] with N up to 1024.

    Scores are softmax(logits), sigmoid(logits), or the logits themselves (softmax_topk), of which the chosen k then
    take the softmax. Chosen are the largest of score + bias; with groups only experts of the top_groups groups whose
    two largest have the largest sums. A weight is the expert's score, without the bias, times scaling; renormalize
    divides it by 1e-20 + the sum of the k scores. Of equals the lowest index comes first; NaN counts as the largest.
    Sums in fp32 decide with a bias or groups: those that differ by less than its rounding come in either order.
    bias fp32 [N]; weights [..., k] fp32, ids [..., k] int32.
    """
    ranked = _ranked(logits, bias, scoring, groups)
    ids = _order(ranked, groups, top_groups)[..., :k]
    return _weights(_scores(logits, scoring).gather(-1, ids), scoring, renormalize, scaling), ids.to(torch.int32)
