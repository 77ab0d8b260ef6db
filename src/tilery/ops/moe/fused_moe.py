"""Contract of fused_moe."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilery.base.errors import BadInput, require
from tilery.base.spec import Bucket, Case, Cost, TensorSpec, case, dtype_name
from tilery.core import inputs as draw
from tilery.core.op import op
from tilery.core.peers import baselines
from tilery.ops.matmul import contract as products
from tilery.ops.matmul.call import layout as layout_of
from tilery.ops.moe import contract
from tilery.ops.moe.backward import fused_moe_backward
from tilery.ops.moe.call import FusedMoeCall
from tilery.ops.rows import contract as rows


def _check(call: FusedMoeCall) -> None:
    x, w_gate_up, w_down = call.x, call.w_gate_up, call.w_down
    rows.check_rows("x", x, products.ALLOWED)
    require(len(x.shape) == 2, f"x must be [T, H], got {list(x.shape)}")
    for name, w, sizes in (("w_gate_up", w_gate_up, "[E, 2I, H]"), ("w_down", w_down, "[E, H, I]")):
        products.check_operand(name, w, sizes)
        require(w.dtype == x.dtype, f"{name} must be {dtype_name(x.dtype)} as x is, got {dtype_name(w.dtype)}")
    experts, hidden, size = w_down.shape
    require(experts >= 1 and size >= 1, f"w_down must be [E, H, I] with E and I from 1 on, got {list(w_down.shape)}")
    require(hidden == x.shape[1], f"w_down must be [E, {x.shape[1]}, I] as x is [T, H], got {list(w_down.shape)}")
    require(
        tuple(w_gate_up.shape) == (experts, 2 * size, hidden),
        f"w_gate_up must be [{experts}, {2 * size}, {hidden}] as w_down is [E, H, I], got {list(w_gate_up.shape)}",
    )
    contract.check_ids(call.ids, call.expert_map)
    require(call.ids.shape[0] == x.shape[0], f"ids must be [{x.shape[0]}, k] as x is, got {list(call.ids.shape)}")
    _check_small("weights", call.weights, torch.float32, tuple(call.ids.shape))
    _check_small("b_gate_up", call.b_gate_up, x.dtype, (experts, 2 * size))
    _check_small("b_down", call.b_down, x.dtype, (experts, hidden))
    if call.add is not None:
        rows.check_rows("add", call.add, products.ALLOWED)
        rows.check_like("add", call.add, "x", x)


def _check_small(name: str, x: TensorSpec | None, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    if x is None:
        return
    wanted = f"{dtype_name(dtype)}{list(shape)}"
    require(
        x.dtype == dtype and tuple(x.shape) == shape,
        f"{name} must be {wanted}, got {dtype_name(x.dtype)}{list(x.shape)}",
    )
    dense = TensorSpec.contiguous(x.shape, x.dtype, x.device).strides
    lies = all(a == b or length <= 1 for a, b, length in zip(x.strides, dense, x.shape))
    require(lies, f"{name} must be contiguous, got strides {list(x.strides)}; call .contiguous() on it")


def _check_runtime(limit: float, alpha: float, up_offset: float) -> None:
    """Written so that NaN is refused."""
    if not 0 <= limit < math.inf:
        raise BadInput(f"limit must be 0, which is none, or more and finite, got {limit}")
    for name, value in (("alpha", alpha), ("up_offset", up_offset)):
        if not math.isfinite(value):
            raise BadInput(f"{name} must be finite, got {value}")


def _outputs(call: FusedMoeCall) -> dict[str, TensorSpec]:
    return {"y": rows.like(call.x)}


def _cost(call: FusedMoeCall) -> Cost:
    """Weights of the experts that are expected to have a token are read once."""
    a_token = 3 * call.size * call.hidden
    weights = call.experts_hit * a_token * call.x.dtype.itemsize if call.tokens else 0
    reads = sum(x.nbytes for x in (call.x, call.weights, call.ids, call.add, call.expert_map) if x is not None)
    return Cost(2 * a_token * call.expected, reads + weights, call.x.nbytes)


def _bucket(call: FusedMoeCall) -> Bucket:
    known = call.expert_map.shape[0] if call.expert_map is not None else call.experts
    kind = f"{dtype_name(call.x.dtype)},{layout_of(call.w_gate_up)}{layout_of(call.w_down)}"
    sizes = f"n={call.size},k={call.hidden},experts={call.experts}of{known},topk={call.topk}"
    return Bucket(exact=f"{sizes},{kind}", scaled={"m": call.tokens})


def _allowed(call: FusedMoeCall) -> dict[torch.dtype, float]:
    """A sum over products of two sums: fp32 has the error of all three."""
    found = products.allowed_of_sums(call.x.dtype, max(call.hidden, call.size))
    return {dtype: most if dtype.itemsize < 4 else 2 * most for dtype, most in found.items()}


def _inputs(
    m: int, n: int, k: int, experts: int, topk: int, dtype: str = "bf16", layout: str = "contiguous",
    special: str = "none", layout_b: str = "contiguous", biases: bool = False, interleaved: bool = False,
    add: bool = False, away: int = 0, spread: str = "random", outside: bool = False, limit: float = 0.0,
    alpha: float = 1.0, up_offset: float = 0.0, device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """n is I and k is H; `layout_b` is that of both weights, `away` counts experts of other ranks."""
    g, wanted = draw.generator(seed, device), draw.dtype_of(dtype)
    x = draw.matrix(m, k, dtype, g, layout, special)
    w_gate_up = products.draw(experts, 2 * n, k, dtype, g, layout_b).mul_(max(k, 1) ** -0.5)
    w_down = products.draw(experts, k, n, dtype, g, layout_b).mul_(max(n, 1) ** -0.5)
    weights = torch.rand(m, topk, generator=g, device=device) + 0.1
    bias = [torch.randn(experts, size, generator=g, device=device).to(wanted) for size in (2 * n, k)]
    return {
        "x": x, "w_gate_up": w_gate_up, "w_down": w_down, "weights": weights / weights.sum(-1, keepdim=True),
        "ids": contract.draw_ids(m, topk, experts + away, spread, outside, g),
        "b_gate_up": bias[0] if biases else None, "b_down": bias[1] if biases else None,
        "add": draw.matrix(m, k, dtype, g, layout) if add else None,
        "expert_map": contract.draw_map(experts, away, g),
        "interleaved": interleaved, "limit": limit, "alpha": alpha, "up_offset": up_offset,
    }  # fmt: skip


def _gated(both: Tensor, interleaved: bool, limit: float, alpha: float, up_offset: float) -> Tensor:
    gate, up = (both[..., ::2], both[..., 1::2]) if interleaved else both.chunk(2, dim=-1)
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + up_offset)


def _loop(
    x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor, b_gate_up: Tensor | None,
    b_down: Tensor | None, add: Tensor | None, expert_map: Tensor | None, interleaved: bool, *how: float,
) -> Tensor:  # fmt: skip
    """Expert by expert; which ones have tokens, the host waits for."""
    local = contract.local_experts(ids, expert_map, len(w_down))
    y = torch.zeros_like(x) if add is None else add.clone()
    for expert in local.unique().tolist():
        if expert == len(w_down):
            continue
        tokens, places = (local == expert).nonzero(as_tuple=True)
        both = x[tokens] @ w_gate_up[expert].t()
        h = _gated(both if b_gate_up is None else both + b_gate_up[expert], interleaved, *how)
        out = h @ w_down[expert].t()
        out = out if b_down is None else out + b_down[expert]
        y.index_add_(0, tokens, (out * weights[tokens, places, None]).to(y.dtype))
    return y


def _torch(
    x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor, b_gate_up: Tensor | None,
    b_down: Tensor | None, add: Tensor | None, expert_map: Tensor | None, interleaved: bool, *how: float,
) -> Tensor:  # fmt: skip
    """As transformers does it: rows sorted by expert, torch's grouped products, rows put back and summed."""
    local, experts = contract.local_experts(ids, expert_map, len(w_down)).flatten(), len(w_down)
    order = local.argsort(stable=True)
    expert = local[order]
    here, of = (expert < experts).unsqueeze(-1), expert.clamp(max=experts - 1)
    ends = torch.searchsorted(expert, torch.arange(experts, device=x.device), right=True).to(torch.int32)
    both = F.grouped_mm(x[order // ids.shape[1]], w_gate_up.transpose(1, 2), offs=ends)
    h = _gated(both if b_gate_up is None else both + b_gate_up[of], interleaved, *how)
    out = F.grouped_mm(h.masked_fill(~here, 0), w_down.transpose(1, 2), offs=ends)
    out = out if b_down is None else out + b_down[of]
    out = (out * weights.flatten()[order].unsqueeze(-1)).masked_fill(~here, 0)
    y = torch.empty_like(out).index_copy_(0, order, out).view(*ids.shape, -1).sum(1).to(x.dtype)
    return y if add is None else y + add


_OSS: dict[str, Any] = {"interleaved": True, "biases": True, "limit": 7.0, "alpha": 1.702, "up_offset": 1.0}


# What the CUDA kernel refuses, by the words of its refusal.
_MANY, _ODD, _TRANSPOSED = ({"cuda": why} for why in ("128 assignments", "multiples of 16 bytes", "must be contiguous"))


def _cases() -> list[Case]:
    small: dict[str, Any] = {"n": 24, "k": 40, "experts": 6, "topk": 2, "dtype": "fp32"}
    return [
        case(_ODD, m=37, n=33, k=65, experts=5, topk=3, dtype="fp32"),  # odd tails on every side
        case(m=9, n=24, k=40, experts=3, topk=2, dtype="fp16"),
        case(_MANY, m=70, n=72, k=136, experts=4, topk=2, dtype="fp16"),
        case(_MANY, m=70, n=72, k=136, experts=4, topk=2, dtype="bf16"),
        case(m=1, n=48, k=96, experts=16, topk=4, dtype="fp16"),  # one token: no expert has two
        case(m=1, n=48, k=96, experts=16, topk=4, dtype="bf16", add=True),
        case(m=3, n=40, k=64, experts=40, topk=2, dtype="fp16", biases=True),
        case(m=21, n=40, k=64, experts=5, topk=2, dtype="fp32", **_OSS),
        case(m=21, n=40, k=64, experts=5, topk=2, dtype="bf16", **_OSS),
        case(m=1, n=40, k=64, experts=8, topk=2, dtype="fp16", **(_OSS | {"limit": 0.3}), add=True),
        case(m=21, n=40, k=64, experts=5, topk=2, dtype="fp16", limit=0.3, alpha=0.3, up_offset=-0.3),
        case(m=21, biases=True, add=True, **small),
        case(m=33, spread="one", **(small | {"topk": 1})),  # all tokens on one expert
        case(m=20, **(small | {"experts": 3, "topk": 3})),  # all tokens on all experts
        case(m=20, **(small | {"experts": 1, "topk": 1})),
        case(_ODD, m=1, **(small | {"n": 1, "k": 1, "experts": 1, "topk": 1})),
        case(m=0, **small),  # nothing to launch
        case(m=4, **(small | {"k": 0})),
        case(m=30, away=18, **small),  # experts of other ranks
        case(m=2, away=18, add=True, **small),
        case(m=30, away=18, add=True, **(small | {"dtype": "bf16"})),
        case(m=30, outside=True, **small),  # ids that are no expert's count nowhere
        case(m=1, outside=True, add=True, **small),
        case(m=30, outside=True, away=7, biases=True, **small),
        case(m=30, layout="padded", layout_b="padded", add=True, **(small | {"dtype": "fp16"})),
        case(_ODD, m=30, layout="misaligned", layout_b="misaligned", add=True, **(small | {"k": 41, "dtype": "bf16"})),
        case(_TRANSPOSED, m=30, layout_b="transposed", **small),
        case(_TRANSPOSED, m=1, layout_b="transposed", **(small | {"dtype": "fp16"})),
        case(m=5, layout="far", add=True, **(small | {"dtype": "fp16"})),  # more than 2**31 elements, first to last
        case(m=5, layout_b="far", **(small | {"experts": 1, "topk": 1, "dtype": "fp16"})),
        case(m=1, layout_b="far", **(small | {"experts": 2, "dtype": "fp16"})),
        case(m=30, special="nan", **small),  # NaN stays with its token
        case(m=1, special="nan", limit=1.0, **small),
        case(m=30, special="nan", limit=1.0, **small),
    ]


# Tokens of a pass through Qwen3-30B-A3B, Mixtral-8x7B, and one of eight ranks of DeepSeek-V3.
_MODELS: list[dict[str, Any]] = [
    {"n": 768, "k": 2048, "experts": 128, "topk": 8},
    {"n": 14336, "k": 4096, "experts": 8, "topk": 2},
    {"n": 2048, "k": 7168, "experts": 32, "topk": 8, "away": 224},
]


def _model_sizes(model: Any) -> list[dict[str, int]]:
    if not model.n_routed_experts:
        return []
    sizes = {"n": model.mlp_size, "k": model.hidden_size, "experts": model.n_routed_experts}
    return [sizes | {"topk": model.num_experts_per_tok}]


@op(
    check=_check, outputs=_outputs, cost=_cost, bucket=_bucket, inputs=_inputs, allowed=_allowed, rounds_between=True,
    call_type=FusedMoeCall, runtime=("limit", "alpha", "up_offset"), check_runtime=_check_runtime,
    kernels={
        "numba": "numba_fused:fused_moe", "triton": "triton_fused:fused_moe",
        "cuda": "tilery.ops.moe.cuda.fused:fused_moe",
    },
    baselines=baselines(torch=_torch, loop=_loop), model_sizes=_model_sizes,
    indices=lambda call: contract.check_indices(call, call.w_down.shape[0]), backward=fused_moe_backward,
    cases={
        "test": _cases(),
        "bench": [case(m=m, dtype="bf16", **sizes) for sizes in _MODELS for m in (1, 8, 64, 512, 4096)],
        "bench_cpu": [
            case(m=m, n=256, k=512, experts=16, topk=4, dtype=dtype) for m, dtype in ((1, "bf16"), (128, "fp32"))
        ],
    },
)  # fmt: skip
def fused_moe(
    x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor, b_gate_up: Tensor | None = None,
    b_down: Tensor | None = None, add: Tensor | None = None, expert_map: Tensor | None = None,
    interleaved: bool = False, limit: float = 0.0, alpha: float = 1.0, up_offset: float = 0.0,
) -> Tensor:  # fmt: skip
    """y[t] = add[t] + Σ weights[t, j] · (w_down[e] h + b_down[e]) over t's experts e = ids[t, j], in the order of j.

    h = g · sigmoid(alpha · g) · (u + up_offset), where g and u are gate and up = w_gate_up[e] x[t] + b_gate_up[e], g at
    most limit and u from -limit to limit unless that is 0. The first I rows of w_gate_up[e] are gate, the others up;
    with interleaved the even rows are gate. h is rounded to x's dtype, and so may be what is summed over j.
    With an int32 expert_map [G] e is expert_map[ids[t, j]]. Ids and entries that are no expert's count nowhere.
    x, add, y [T, H], w_gate_up [E, 2I, H], w_down [E, H, I], weights fp32 and ids int32 [T, k], b_gate_up [E, 2I],
    b_down [E, H].
    """
    how = limit, alpha, up_offset
    return _loop(x, w_gate_up, w_down, weights, ids, b_gate_up, b_down, add, expert_map, interleaved, *how)
