"""Contract of mla: multi-head latent attention of a prefill."""

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tilery.base.errors import require
from tilery.base.spec import Bucket, Cost, TensorSpec, case, dtype_name
from tilery.core import inputs as random
from tilery.core.op import op
from tilery.core.peers import baselines
from tilery.ops.attention import peers, reference
from tilery.ops.attention.attention import ALLOWED, indices, outputs, reads
from tilery.ops.attention.call import MlaCall
from tilery.ops.attention.cases import for_hopper, write_wrong
from tilery.ops.attention.checks import check_packed, check_qkv, check_scale

_HEAD_DIMS, _ROPE_DIMS = (16, 32, 64, 128), (16, 32, 64)  # of a head's first part and values, and of its turned part


def check(call: MlaCall) -> None:
    q, v = call.q, call.v
    require(q.dtype in ALLOWED, f"q must be one of {', '.join(map(dtype_name, ALLOWED))}, got {dtype_name(q.dtype)}")
    check_qkv(call)
    for name, x in (("q", q), ("v", v)):
        known = ", ".join(map(str, _HEAD_DIMS))
        require(x.shape[-1] in _HEAD_DIMS, f"{name}'s heads must be of {known}, got {x.shape[-1]}")
    same = call.kv_heads == call.heads
    require(same, f"k must have as many heads as q, {call.heads}, got {call.kv_heads}")
    _check_turned("q_rope", call.q_rope, "q", call.q, call.heads, call.layout)
    _check_turned("k_rope", call.k_rope, "k", call.k, 1, call.layout)
    of_key = call.k_rope.shape[-1]
    require(of_key == call.rope_dim, f"k_rope's heads must be of {call.rope_dim} as q_rope's are, got {of_key}")
    check_packed(call)


def _check_turned(name: str, x: TensorSpec, other: str, y: TensorSpec, heads: int, layout: str) -> None:
    """x has y's tokens, so many heads, and a size of its own."""
    require(x.dtype == y.dtype, f"{name} must be {dtype_name(y.dtype)} as {other} is, got {dtype_name(x.dtype)}")
    want, known = list(y.shape), ", ".join(map(str, _ROPE_DIMS))
    want[layout.index("h")] = heads
    fits = list(x.shape[:-1]) == want[:-1] and x.shape[-1] in _ROPE_DIMS
    require(fits, f"{name} must be {want[:-1]} and one of {known}, for {other} {list(y.shape)}, got {list(x.shape)}")
    require(x.stride(-1) == 1, f"{name} must have stride 1 along its last dimension, got {list(x.strides)}")


def cost(call: MlaCall) -> Cost:
    flops = 2 * call.visible_pairs * (call.head_dim + call.value_dim)
    return Cost(flops, reads(mla, call), outputs(call)["out"].nbytes)


def bucket(call: MlaCall) -> Bucket:
    sizes = f"h={call.heads},d={call.q.shape[-1]}+{call.rope_dim},e={call.value_dim}"
    exact = f"{sizes},{dtype_name(call.q.dtype)},{call.layout}" + (",causal" if call.causal else "")
    return Bucket(exact, {"m": call.queries, "keys": call.keys, "batch": call.batch})


# Cases


def inputs(
    m: int, heads: int = 2, nope: int = 128, rope: int = 64, value: int = 128, dtype: str = "bf16", batch: int = 1,
    keys: int = -1, causal: bool = True, order: str = "bshd", lengths: str = "", scale: float | None = None,
    wrong: str = "", layout: str = "contiguous", special: str = "none", device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """m queries and so many keys (-1: m) of each sequence; packed ones have `lengths`, as 5+0+7, of both, then NaN.

    Where `layout` is not contiguous, q and q_rope are views of one tensor, as k and v are. `special` is in v, `wrong`
    entries (cases.write_wrong) in cu_seqlens.
    """
    g, packed = random.generator(seed, device), order == "thd"
    keys = m if keys < 0 else keys
    sizes = [int(n) for n in lengths.split("+")] if lengths else [m] * batch
    tokens = (sum(sizes) + 5,) * 2 if packed else (batch * m, batch * keys)
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
    edges = [0, *accumulate(sizes)]
    ends = [torch.tensor(edges, dtype=torch.int32, device=g.device) if packed else None for _ in range(2)]
    write_wrong(wrong, q=ends[0], k=ends[1])
    names = ("q", "q_rope", "k", "k_rope", "v")
    bounds = {"max_seqlen_q": max(*sizes, 1), "max_seqlen_k": max(*sizes, 1)} if packed else {}
    return {
        **dict(zip(names, made)), "cu_seqlens_q": ends[0], "cu_seqlens_k": ends[1], "scale": scale, "causal": causal,
        "layout": order, **bounds,
    }  # fmt: skip


def _views(tokens: int, heads: int, sizes: tuple[int, int], dtype: str, g: Any, layout: str) -> list[Tensor]:
    if layout == "contiguous":
        return [random.matrix(tokens, heads * size, dtype, g).unflatten(-1, (heads, size)) for size in sizes]
    both = random.matrix(tokens, heads * sum(sizes), dtype, g, layout).unflatten(-1, (heads, sum(sizes)))
    return list(both.split(sizes, -1))


def _as_attention(
    q: Tensor, q_rope: Tensor, k: Tensor, k_rope: Tensor, v: Tensor, cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None, scale: float | None, causal: bool, layout: str, max_seqlen_q: int, max_seqlen_k: int,
) -> dict[str, Any]:  # fmt: skip
    """The arguments of attention that mean the same, in their order: k_rope is copied to every head."""
    options = dict.fromkeys(("key_mask", "bias", "slopes", "sinks", "q_scale", "k_scale", "v_scale"))
    return {
        "q": torch.cat((q, q_rope), -1), "k": torch.cat((k, k_rope.expand(*k.shape[:-1], -1)), -1), "v": v,
        "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, **options, "scale": scale, "causal": causal,
        "window": 0, "softcap": 0.0, "layout": layout, "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k,
    }  # fmt: skip


def _model_sizes(model: Any) -> list[dict[str, int]]:
    if not model.kv_lora_rank:
        return []
    _, nope, rope, value = model.mla_sizes()
    return [{"heads": model.query_heads, "nope": nope, "rope": rope, "value": value}]


_SMALL: dict[str, Any] = {"nope": 32, "rope": 16, "value": 32}
_V3: dict[str, Any] = {"heads": 16, "nope": 128, "rope": 64, "value": 128, "dtype": "bf16"}


@op(
    check=check, outputs=outputs, cost=cost, bucket=bucket, inputs=inputs, allowed=ALLOWED, call_type=MlaCall,
    rounds_between=True, runtime=("scale",), check_runtime=check_scale, indices=indices, model_sizes=_model_sizes,
    kernels={
        "numba": "tilery.ops.attention.numba.forward:mla",
        "triton": "tilery.ops.attention.triton.mla:mla",
        "cuda.hopper": "tilery.ops.attention.cuda.mla:mla",  # behind Triton's: no GPU has run it
    },
    baselines=baselines(
        torch=lambda *args: peers.torch_sdpa(*_as_attention(*args).values()),
        cudnn=lambda *args: peers.cudnn(*_as_attention(*args).values()),
    ),
    cases={
        "test": list(map(for_hopper, [
            case(m=40, batch=2, heads=3, dtype="fp32", **_SMALL),
            case(m=70, heads=2, dtype="fp16"),
            case(m=70, heads=2, dtype="bf16"),
            case(m=150, batch=2, heads=2, dtype="fp16", causal=False, **_SMALL),  # several tiles each way
            case(m=33, keys=90, heads=2, dtype="fp16", order="bhsd", **_SMALL),  # the last query is at the last key
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
            case(m=70, heads=1, nope=32, rope=16, value=16, dtype="fp16", layout="misaligned"),
            case(m=3, heads=2, dtype="fp16", layout="far", **_SMALL),
            case(m=20, heads=2, dtype="fp32", causal=False, special="nan", **_SMALL),
            case(m=20, heads=2, dtype="fp16", causal=False, special="inf", **_SMALL),
            # Heads of DeepSeek's sizes, and others of several chunks of 64 columns.
            case(m=33, keys=150, heads=2, dtype="bf16", order="bhsd"),
            case(m=70, keys=21, heads=2, dtype="fp16"),  # the first queries see nothing
            case(m=140, heads=1, dtype="fp16", causal=False, layout="padded", batch=2),
            case(m=130, heads=2, dtype="bf16", order="thd", lengths="5+0+130+1"),
            case(m=30, heads=1, dtype="fp16", order="thd", lengths="5+30+9", causal=False, wrong="q0:1+k3:1073741824"),
            case(m=40, heads=1, dtype="bf16", scale=-0.2, layout="padded"),
            case(m=40, heads=2, nope=64, rope=64, value=64, dtype="bf16"),
            case(m=20, heads=2, nope=128, rope=16, value=16, dtype="fp16", order="thd", lengths="20+7"),
        ])),
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
    1 / sqrt(D + R). The last query is at the position of the last key. A query that sees nothing gives zeros.
    """
    given = q, q_rope, k, k_rope, v, cu_seqlens_q, cu_seqlens_k, scale, causal, layout, max_seqlen_q, max_seqlen_k
    return reference.attention_lse(**_as_attention(*given))[0]
