"""Contract of sample."""

import math
from typing import Any

import torch
from torch import Tensor

from tilery.base.errors import BadInput
from tilery.base.rows import rows as rows_of
from tilery.base.spec import Case, Cost, case
from tilery.core import inputs as draw
from tilery.core.call import Call
from tilery.core.op import op
from tilery.core.peers import Compiled, baselines
from tilery.ops.memory import philox
from tilery.ops.rows import contract as rows
from tilery.ops.sampling.argmax import ALLOWED, bucket, check, outputs

_COLDEST, _HOTTEST = 1e-30, 1e30  # logits that are divided by them stay in the range of fp32


def _check_runtime(seed: int, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    """At every call, so without a message until it is needed; written so that NaN is refused."""
    if not (_COLDEST <= temperature <= _HOTTEST or -math.inf < temperature <= 0):
        known = f"0 or less, which takes the largest logit, or from {_COLDEST} to {_HOTTEST}"
        raise BadInput(f"temperature must be {known}, got {temperature}")
    if top_k < 0:
        raise BadInput(f"top_k must be 0, which keeps all, or more, got {top_k}")
    if not 0 <= top_p <= 1:
        raise BadInput(f"top_p must be from 0 to 1, which keeps all, got {top_p}")
    if not 0 <= min_p <= 1:
        raise BadInput(f"min_p must be from 0, which keeps all, to 1, got {min_p}")


def _cost(call: Call) -> Cost:
    m, n, _ = rows_of(call.logits)
    return Cost(20 * m * n, call.logits.nbytes, 8 * m)


def _inputs(
    m: int, n: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none", batch: int = 0,
    temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0,
    device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    logits = rows.draw(m, n, dtype, draw.generator(seed, device), layout, special, batch)
    logits *= 3  # in place: the layout stays
    numbers = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    return {"logits": logits, "seed": seed * 0x9E3779B97F4A7C15 % 2**63, **numbers}


def _exponentials(m: int, n: int, seed: int, device: Any) -> Tensor:
    """-log(1 - u), u uniform, for m rows and n columns."""
    column, row = torch.arange(philox.quarter(n), device=device), torch.arange(m, device=device)
    words = torch.cat(philox.words(seed, column.expand(m, -1), row[:, None].expand(-1, len(column))), 1)[:, :n]
    return -torch.log1p(-((words.double() + 0.5) * 2.0**-32).clamp(max=philox.BELOW_ONE))


def _torch(logits: Tensor, seed: int, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """As a sampler with torch's own random numbers does it, but for the seed: sort, cut, draw."""
    ordered, tokens = logits.float().sort(dim=-1, descending=True)
    p = torch.softmax(ordered / temperature, -1)
    places = torch.arange(p.shape[-1], device=p.device)
    kept = (places < (top_k or p.shape[-1])) & (p >= min_p * p[..., :1])
    kept = kept & (p.cumsum(-1) - p < top_p)
    drawn = (p.where(kept, 0.0) / torch.empty_like(p).exponential_()).argmax(-1, keepdim=True)
    return tokens.gather(-1, drawn).squeeze(-1)


_compiled = Compiled(lambda logits, *how: _torch(logits, 0, *how))


def _torch_compile(logits: Tensor, seed: int, *how: Any) -> Any:
    """Without the seed, which it does not use and would be compiled anew for."""
    return _compiled(logits, *how)


def _cases() -> list[Case]:
    return [
        case(m=3, n=300, dtype="fp32", temperature=0.8, top_k=40, top_p=0.9, min_p=0.02),
        case(m=3, n=300, dtype="fp16", temperature=0.8, top_k=40, top_p=0.9, min_p=0.02),
        case(m=3, n=300, dtype="bf16", temperature=0.8, top_k=40, top_p=0.9, min_p=0.02),
        case(m=12, n=1000, dtype="fp32"),  # from the whole distribution
        case(m=20, n=1000, dtype="bf16"),
        case(m=3, n=127, dtype="fp16", top_k=5),
        case(m=3, n=200, dtype="bf16", top_k=5),
        case(m=4, n=200, dtype="fp32", top_p=0.5),
        case(m=4, n=200, dtype="bf16", top_p=0.5),
        case(m=4, n=200, dtype="fp32", temperature=2.0, min_p=0.1),
        case(m=4, n=200, dtype="fp32", temperature=0.0, top_k=3),  # the largest
        case(m=4, n=200, dtype="fp16", temperature=-1.0, top_p=0.5),
        case(m=4, n=200, dtype="fp32", temperature=1e-30),
        case(m=4, n=200, dtype="fp32", temperature=1e30, top_k=7),
        case(m=4, n=200, dtype="fp32", top_p=0.0),
        case(m=4, n=200, dtype="fp32", min_p=1.0, top_k=1000),
        case(m=1, n=1, dtype="fp32", top_p=0.1),
        case(m=0, n=128, dtype="fp32"),  # nothing to launch
        case(m=2, n=96, dtype="fp32", batch=3, top_k=9),  # [batch, m, n]
        case(m=5, n=256, dtype="fp16", layout="padded"),
        case(m=5, n=256, dtype="fp32", layout="misaligned", top_p=0.8),
        case(m=3, n=72, dtype="fp16", layout="far"),  # more than 2**31 elements from first to last
        case(m=3, n=200, dtype="fp32", special="nan", top_k=20, top_p=0.9),
        case(m=3, n=200, dtype="fp16", special="inf", top_k=20, min_p=0.1),
        case(m=3, n=200, dtype="fp32", special="-inf", top_p=0.9),
        case(m=2, n=20000, dtype="fp32", top_p=0.95),
    ]


@op(
    check=check, outputs=outputs, cost=_cost, bucket=bucket, inputs=_inputs, allowed=ALLOWED,
    runtime=("seed", "temperature", "top_k", "top_p", "min_p"), check_runtime=_check_runtime,
    kernels={"numba": "numba_kernels:sample", "triton": "triton_kernels:sample"},
    baselines=baselines(torch=_torch, compile=_torch_compile),
    model_sizes=lambda model: [{"n": model.vocab_size}],
    cases={
        "test": _cases(),
        # So cold that every sampler takes the largest: else what peers draw could not be checked. fp32 has no ties.
        "bench": [
            case(m=m, n=128256, dtype="fp32", temperature=1e-5, top_k=top_k, top_p=top_p)
            for m, top_k, top_p in ((1, 0, 1.0), (16, 0, 1.0), (16, 50, 0.9), (256, 50, 0.9))
        ],
        "bench_cpu": [case(m=16, n=128256, dtype="fp32", temperature=1e-5, top_k=50, top_p=0.9)],
    },
)  # fmt: skip
def sample(
    logits: Tensor, seed: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """Draws an index from softmax(logits / temperature) of each row: the same for the same seed, row and logits.

    Kept are the top_k largest values (0: all), of these the fewest of the largest whose share is top_p, and of these
    those with min_p times the probability of the largest; values equal to the last one kept are kept too. Of them wins
    the largest logit / temperature - log(e), e = -log(1 - (w + 1/2) / 2³²), of equals the first. w is word c // q of
    Philox 4x32-10 under the key seed, of the counter (c % q, row, 0, 0), for column c and q = 16 · ceil(N / 64).
    A temperature of 0 or less takes the largest logit; others must be from 1e-30 to 1e30, top_p and min_p from 0 to 1.
    NaN counts as -inf; without anything larger the index is 0.
    logits [..., N], result [...] int64.
    """
    n = logits.shape[-1]
    x = logits.reshape(-1, n)
    x = x.where(~x.isnan(), -math.inf)
    if temperature <= 0:
        return x.argmax(-1).reshape(logits.shape[:-1])
    top, kept = x.amax(-1, keepdim=True), torch.ones_like(x, dtype=torch.bool)
    if 0 < top_k < n:
        kept = x >= x.topk(top_k).values[:, -1:]
    if top_p < 1:
        ordered = x.where(kept, -math.inf).sort(dim=-1, descending=True).values
        share = ((ordered - top) / temperature).exp().cumsum(-1)
        last = (share < top_p * share[:, -1:]).sum(-1, keepdim=True).clamp(max=n - 1)
        kept = kept & (x >= ordered.gather(-1, last))
    least = top + temperature * math.log(min_p) if min_p > 0 else -math.inf
    score = x / temperature - _exponentials(len(x), n, seed, x.device).log()
    return score.where(kept & (x >= least), -math.inf).argmax(-1).reshape(logits.shape[:-1])
