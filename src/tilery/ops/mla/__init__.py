from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tilery.base.errors import require
from tilery.base.spec import Bucket, Cost, TensorSpec, case, dtype_name
from tilery.core import inputs as random
from tilery.core.op import op
from tilery.core.peers import baselines
from tilery.parts import attention as parts
from tilery.parts import attention_peers as peers
from tilery.parts.attention import ALLOWED, Problem, pairs
from tilery.parts.attention_cases import plant
from tilery.parts.attention_checks import check_packed, check_qkv, check_scale
from tilery.parts.attention_indices import require_packed
from tilery.parts.heads import heads

SIZES, ROPES = (16, 32, 64, 128), (16, 32, 64)  # of a head, and of its turned part
_SCALE = 7  # where the scale stands among all arguments


def check(
    q: TensorSpec, q_rope: TensorSpec, k: TensorSpec, k_rope: TensorSpec, v: TensorSpec,
    cu_seqlens_q: TensorSpec | None, cu_seqlens_k: TensorSpec | None,
    causal: bool, layout: str, max_seqlen_q: int, max_seqlen_k: int,
) -> None:  # fmt: skip
    require(q.dtype in ALLOWED, f"q must be one of {', '.join(map(dtype_name, ALLOWED))}, got {dtype_name(q.dtype)}")
    check_qkv(q, k, v, layout)
    for name, x in (("q", q), ("v", v)):
        known = ", ".join(map(str, SIZES))
        require(x.shape[-1] in SIZES, f"{name}'s heads must be of {known}, got {x.shape[-1]}")
    count, of_keys = heads(q, layout).heads, heads(k, layout).heads
    require(of_keys == count, f"k must have as many heads as q, {count}, got {of_keys}")
    _check_turned("q_rope", q_rope, "q", q, count, layout)
    _check_turned("k_rope", k_rope, "k", k, 1, layout)
    same = q_rope.shape[-1] == k_rope.shape[-1]
    require(same, f"k_rope's heads must be of {q_rope.shape[-1]} as q_rope's are, got {k_rope.shape[-1]}")
    check_packed(cu_seqlens_q, cu_seqlens_k, layout, max_seqlen_q, max_seqlen_k)


def _check_turned(name: str, x: TensorSpec, other: str, y: TensorSpec, count: int, layout: str) -> None:
    """x has y's tokens, `count` heads, and a size of its own."""
    require(x.dtype == y.dtype, f"{name} must be {dtype_name(y.dtype)} as {other} is, got {dtype_name(x.dtype)}")
    want, (dim, known) = list(y.shape), (layout.index("h"), ", ".join(map(str, ROPES)))
    want[dim] = count
    fits = list(x.shape[:-1]) == want[:-1] and x.shape[-1] in ROPES
    require(fits, f"{name} must be {want[:-1]} and one of {known}, for {other} {list(y.shape)}, got {list(x.shape)}")
    require(x.stride(-1) == 1, f"{name} must have stride 1 along its last dimension, got {list(x.strides)}")


def outputs(q: TensorSpec, q_rope: TensorSpec, k: TensorSpec, k_rope: TensorSpec, v: TensorSpec, *_: Any) -> Any:
    return parts.outputs(q, k, v)


def problem(outs: Any, specs: tuple[Any, ...], scale: float | None = None) -> Problem:
    """Of all arguments but the scale: attention with heads as wide as both parts, whose strides are the first one's."""
    q, q_rope, k, _, v, cu_q, cu_k, causal, *bounds = specs
    width = q.shape[-1] + q_rope.shape[-1]
    made = parts.problem(outs, (q, k, v, cu_q, cu_k, *[None] * 7, causal, 0, 0.0, *bounds), scale)
    return made._replace(size=width, scale=width**-0.5 if scale is None else float(scale))


def problem_of_run(outs: Any, args: tuple[Any, ...]) -> Problem:
    return problem(outs, (*args[:_SCALE], *args[_SCALE + 1 :]), args[_SCALE])


def indices(
    q: Tensor, q_rope: Tensor, k: Tensor, k_rope: Tensor, v: Tensor, cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None, scale: float | None, causal: bool, layout: str, max_seqlen_q: int, max_seqlen_k: int,
) -> None:  # fmt: skip
    require_packed(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)


def cost(*specs: Any) -> Cost:
    """Packed sequences count as if all were as long: their lengths are the device's."""
    outs = outputs(*specs)
    p = problem(outs, specs)
    queries, keys = p.queries, p.keys
    if p.cu_q is not None:
        queries, keys = (-(-x.shape[0] // max(p.batch, 1)) for x in (p.q, p.k))
    flops = 2 * p.batch * p.heads * pairs(queries, keys, p.causal, 0) * (p.size + p.value)
    return Cost(flops, sum(x.nbytes for x in specs if isinstance(x, TensorSpec)), outs[0].nbytes)


def bucket(*specs: Any) -> Bucket:
    p, layout = problem(outputs(*specs), specs), specs[-3]
    size = p.q.shape[-1]
    exact = f"h={p.heads},d={size}+{p.size - size},e={p.value},{dtype_name(p.q.dtype)},{layout}"
    exact += ",causal" if p.causal else ""
    return Bucket(exact=exact, scaled={"m": p.queries, "keys": p.keys, "batch": p.batch})


# Cases


def inputs(
    m: int, heads: int = 2, nope: int = 128, rope: int = 64, value: int = 128, dtype: str = "bf16", batch: int = 1,
    keys: int = -1, causal: bool = True, order: str = "bshd", lengths: str = "", scale: float | None = None,
    wrong: str = "", layout: str = "contiguous", special: str = "none", device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """m queries and so many keys (-1: m) of each sequence; packed ones have `lengths`, as 5+0+7, of both, then NaN.

    Where `layout` is not contiguous, q and q_rope are views of one tensor, as k and v are. `special` is in v, `wrong`
    entries (attention_cases.plant) in cu_seqlens.
    """
    g, packed = random.generator(seed, device), order == "thd"
    keys = m if keys < 0 else keys
    long = [int(n) for n in lengths.split("+")] if lengths else [m] * batch
    tokens = (sum(long) + 5,) * 2 if packed else (batch * m, batch * keys)
    q, q_rope = _views(tokens[0], heads, (nope, rope), dtype, g, layout)
    k, v = _views(tokens[1], heads, (nope, value), dtype, g, layout)
    k_rope = random.matrix(tokens[1], rope, dtype, g, layout).unsqueeze(1)
    if special != "none":
        v[tokens[1] // 2, 0, 1] = random.SPECIALS[special]
    made = [q, q_rope, k, k_rope, v]
    if packed:
        for x in made:
            x[-5:] = float("nan")  # tokens of no sequence
    else:
        made = [x.unflatten(0, (batch, m if i < 2 else keys)) for i, x in enumerate(made)]
        made = [x.transpose(1, 2) for x in made] if order == "bhsd" else made
    edges = [0, *accumulate(long)]
    ends = [torch.tensor(edges, dtype=torch.int32, device=g.device) if packed else None for _ in range(2)]
    plant(wrong, q=ends[0], k=ends[1])
    names = ("q", "q_rope", "k", "k_rope", "v")
    bounds = {"max_seqlen_q": max(*long, 1), "max_seqlen_k": max(*long, 1)} if packed else {}
    return {
        **dict(zip(names, made)), "cu_seqlens_q": ends[0], "cu_seqlens_k": ends[1], "scale": scale, "causal": causal,
        "layout": order, **bounds,
    }  # fmt: skip


def _views(tokens: int, heads: int, sizes: tuple[int, int], dtype: str, g: Any, layout: str) -> list[Tensor]:
    if layout == "contiguous":
        return [random.matrix(tokens, heads * size, dtype, g).unflatten(-1, (heads, size)) for size in sizes]
    both = random.matrix(tokens, heads * sum(sizes), dtype, g, layout).unflatten(-1, (heads, sum(sizes)))
    return list(both.split(sizes, -1))


def _joined(*args: Any) -> tuple[Any, ...]:
    """The arguments of `attention` that mean the same: k_rope copied to every head."""
    q, q_rope, k, k_rope, v, cu_q, cu_k, scale, causal, *bounds = args
    q, k = torch.cat((q, q_rope), -1), torch.cat((k, k_rope.expand(*k.shape[:-1], -1)), -1)
    return q, k, v, cu_q, cu_k, *[None] * 7, scale, causal, 0, 0.0, *bounds


def _model_sizes(model: Any) -> list[dict[str, int]]:
    if not model.kv_lora_rank:
        return []
    _, nope, rope, value = model.mla_sizes()
    return [{"heads": model.query_heads, "nope": nope, "rope": rope, "value": value}]


_SMALL: dict[str, Any] = {"nope": 32, "rope": 16, "value": 32}
_V3: dict[str, Any] = {"heads": 16, "nope": 128, "rope": 64, "value": 128, "dtype": "bf16"}


@op(
    check=check, outputs=outputs, cost=cost, bucket=bucket, inputs=inputs, allowed=ALLOWED,
    rounds_between=True, runtime=("scale",),
    check_runtime=check_scale,
    kernels=("numba", "triton"), model_sizes=_model_sizes,
    indices=indices,
    baselines=baselines(torch=lambda *a: peers.default(*_joined(*a)), cudnn=lambda *a: peers.cudnn(*_joined(*a))),
    cases={
        "test": [
            case(m=40, batch=2, heads=3, dtype="fp32", **_SMALL),
            case(m=70, heads=2, dtype="fp16"),
            case(m=70, heads=2, dtype="bf16"),
            case(m=150, batch=2, heads=2, dtype="fp16", causal=False, **_SMALL),  # several tiles each way
            case(m=33, keys=90, heads=2, dtype="fp16", order="bhsd", **_SMALL),  # the last query at the last key
            case(m=60, keys=20, heads=2, dtype="fp32", **_SMALL),  # the first queries see nothing
            case(m=1, keys=50, heads=2, dtype="bf16", batch=2, **_SMALL),
            case(m=33, heads=2, nope=64, rope=32, value=16, dtype="fp32", order="bhsd", causal=False, batch=2),
            case(m=70, heads=2, dtype="fp16", order="thd", lengths="5+0+70+1", **_SMALL),
            case(m=33, heads=3, dtype="fp32", order="thd", lengths="33+20", causal=False, **_SMALL),
            case(m=40, heads=2, dtype="bf16", order="thd", lengths="40+8", **_SMALL),
            case(m=20, heads=1, dtype="fp32", order="thd", lengths="5+9+20", wrong="q0:3+q3:1073741824", **_SMALL),
            case(m=20, heads=2, dtype="fp16", order="thd", lengths="5+20+9", wrong="k3:-7", **_SMALL),
            case(m=1, heads=1, nope=16, rope=16, value=16, dtype="fp32"),
            case(m=5, keys=0, heads=2, dtype="fp32", **_SMALL),  # no key at all: zeros
            case(m=0, keys=5, heads=2, dtype="fp16", **_SMALL),  # nothing to launch
            case(m=40, heads=2, dtype="fp16", scale=5e2, **_SMALL),  # logits of ±1e4
            case(m=20, heads=2, dtype="fp32", scale=-0.2, **_SMALL),
            case(m=40, heads=2, dtype="fp16", layout="padded", batch=2, **_SMALL),
            case(m=40, heads=2, dtype="bf16", layout="misaligned", **_SMALL),
            case(m=3, heads=2, dtype="fp16", layout="far", **_SMALL),
            case(m=20, heads=2, dtype="fp32", causal=False, special="nan", **_SMALL),
            case(m=20, heads=2, dtype="fp16", causal=False, special="inf", **_SMALL),
        ],
        "bench": [
            case(m=4096, batch=4, **_V3),
            case(m=2048, batch=2, **_V3 | {"heads": 128}),
            case(m=8192, batch=1, **_V3),
            case(m=2048, batch=8, order="thd", **_V3),
        ],
        "bench_cpu": [case(m=512, batch=1, **_V3 | {"heads": 4, "dtype": dtype}) for dtype in ("fp32", "bf16")],
    },
)  # fmt: skip
def mla(
    q: Tensor, q_rope: Tensor, k: Tensor, k_rope: Tensor, v: Tensor, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, scale: float | None = None, causal: bool = False, layout: str = "bshd",
    max_seqlen_q: int = 0, max_seqlen_k: int = 0,
) -> Tensor:  # fmt: skip
    """softmax(scale · (q kᵀ + q_rope k_ropeᵀ), masked) · v: MLA's prefill, its keys and values made of the latent.

    q, k [B, S, H, D], v [B, S, H, E], q_rope [B, S, H, R] and one k_rope [B, S, 1, R] for all heads -> [B, S, H, E];
    or other layouts, as attention takes them, with cu_seqlens and max_seqlen of packed ones. scale None is
    1 / sqrt(D + R). The last query stands at the last key. A query that sees nothing gives zeros.
    """
    args = (q, q_rope, k, k_rope, v, cu_seqlens_q, cu_seqlens_k, scale, causal, layout, max_seqlen_q, max_seqlen_k)
    return parts.reference(*_joined(*args))[0]
