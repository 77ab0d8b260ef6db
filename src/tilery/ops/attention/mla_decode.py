"""Contract of mla_decode: multi-head latent attention of 1 to 16 new tokens a sequence, in the latent."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilery.base.errors import require
from tilery.base.spec import Bucket, Cost, TensorSpec, dtype_name
from tilery.core.op import op
from tilery.core.peers import Compiled, baselines
from tilery.ops.attention import paged_peers
from tilery.ops.attention.call import MlaDecodeCall, visible_pairs
from tilery.ops.attention.checks import FLOATS, check_scale
from tilery.ops.attention.indices import require_pages
from tilery.ops.attention.mla_decode_cases import cases, inputs
from tilery.ops.attention.paged import MAX_QUERIES, in_order
from tilery.ops.attention.reference import attend
from tilery.ops.rope import kv_cache

_LATENT_DIMS, _ROPE_DIMS = (16, 32, 64, 128, 256, 512), (16, 32, 64)


def check(call: MlaDecodeCall) -> None:
    q, cache, table = call.q, call.cache, call.block_table
    _check_queries(q, call.q_rope)
    batch, width = q.shape[0], call.latent_dim + call.rope_dim
    require(cache.dtype == q.dtype, f"cache must be {dtype_name(q.dtype)} as q is, got {dtype_name(cache.dtype)}")
    first = f"{batch}, S" if table is None else "blocks, block_size"
    what = f"[{first}, {width}], {call.latent_dim} of the latent and {call.rope_dim} of the turned part"
    fits = len(cache.shape) == 3 and cache.shape[2] == width and (table is not None or cache.shape[0] == batch)
    hint = "; a paged one needs block_table" if table is None else ""
    require(fits, f"cache must be {what}, got {list(cache.shape)}{hint}")
    require(cache.stride(2) == 1, f"cache must have stride 1 along its last dimension, got {cache.stride(2)}")
    _check_integers("lengths", call.lengths, (batch,))
    if table is not None:
        known = ", ".join(map(str, kv_cache.BLOCK_SIZES))
        require(
            cache.shape[1] in kv_cache.BLOCK_SIZES,
            f"cache must have a block_size of {known}, got {cache.shape[1]}",
        )
        most = table.shape[1] if len(table.shape) == 2 else -1
        _check_integers("block_table", table, (batch, most))


def _check_queries(q: TensorSpec, q_rope: TensorSpec) -> None:
    known = ", ".join(map(dtype_name, FLOATS))
    require(q.dtype in FLOATS, f"q must be one of {known}, got {dtype_name(q.dtype)}")
    require(q_rope.dtype == q.dtype, f"q_rope must be {dtype_name(q.dtype)} as q is, got {dtype_name(q_rope.dtype)}")
    fits = len(q.shape) == 4 and q.shape[3] in _LATENT_DIMS and q.shape[2] > 0
    latents, ropes = (", ".join(map(str, known)) for known in (_LATENT_DIMS, _ROPE_DIMS))
    require(fits, f"q must be [B, Q, H, L] with a head or more and L of {latents}, got {list(q.shape)}")
    queries = q.shape[1]
    require(1 <= queries <= MAX_QUERIES, f"q must have 1 to {MAX_QUERIES} queries of a sequence, got {queries}")
    fits = len(q_rope.shape) == 4 and q_rope.shape[:3] == q.shape[:3] and q_rope.shape[3] in _ROPE_DIMS
    require(fits, f"q_rope must be {list(q.shape[:3])} and one of {ropes}, got {list(q_rope.shape)}")
    for name, x in (("q", q), ("q_rope", q_rope)):
        require(x.stride(3) == 1, f"{name} must have stride 1 along its last dimension, got {x.stride(3)}")


def _check_integers(name: str, x: TensorSpec, shape: tuple[int, ...]) -> None:
    want = "[B, most blocks of a sequence]" if -1 in shape else str(list(shape))
    require(x.dtype == torch.int32, f"{name} must be int32, got {dtype_name(x.dtype)}")
    require(x.shape == shape, f"{name} must be {want}, got {list(x.shape)}")
    require(
        x.stride(-1) == 1 or x.shape[-1] <= 1,
        f"{name} must have stride 1 along its last dimension, got {x.stride(-1)}; call .contiguous() on it",
    )


def outputs(call: MlaDecodeCall) -> dict[str, TensorSpec]:
    q = call.q
    batch, queries, heads, _ = q.shape
    lse = TensorSpec.contiguous((batch, heads, queries), torch.float32, q.device)
    return {"out": TensorSpec.contiguous(q.shape, q.dtype, q.device), "lse": lse}


def indices(call: Any) -> None:
    require_pages(call.lengths, call.block_table, call.cache, call.max_keys, call.queries)


def cost(call: MlaDecodeCall) -> Cost:
    """As if every sequence were as long as it may be: lengths are on the device."""
    width = call.latent_dim + call.rope_dim
    pairs = call.batch * call.heads * visible_pairs(call.queries, call.max_keys, True, 0)
    keys = call.batch * call.max_keys * width * call.cache.dtype.itemsize
    written = sum(spec.nbytes for spec in outputs(call).values())
    return Cost(2 * pairs * (width + call.latent_dim), call.q.nbytes + call.q_rope.nbytes + keys, written)


def bucket(call: MlaDecodeCall) -> Bucket:
    """Without the batch: a config splits sequences, and how one is split must not depend on its neighbours."""
    sizes = f"h={call.heads},q={call.queries},latent={call.latent_dim},rope={call.rope_dim},block={call.page}"
    return Bucket(f"{sizes},{dtype_name(call.q.dtype)}", {"context": call.max_keys})


# Probabilities are rounded to q's dtype before they meet values, the output once more; lse is fp32 in any case.
_ALLOWED = {torch.float32: 2e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}


# Peers


def _ready(q: Tensor, cache: Tensor, lengths: Tensor, table: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Keys [B, S, L + R] in one piece, and what is added to scores [B, 1, Q, S] if not all queries see all keys."""
    keys = paged_peers.in_one_piece(cache, lengths, table)
    if q.shape[1] == 1 and paged_peers.full(cache, lengths, table):
        return keys, None
    return keys, paged_peers.masks(lengths, q.shape[1], keys.shape[1], 0, q.dtype)


def _sdpa(
    q: Tensor, q_rope: Tensor, cache: Tensor, lengths: Tensor, block_table: Tensor | None, scale: float
) -> tuple[Tensor, None]:
    """It gives no lse."""
    keys, mask = _ready(q, cache, lengths, block_table)
    queries = torch.cat((q, q_rope), -1).transpose(1, 2)
    k, v = keys[:, None], keys[:, None, :, : q.shape[3]]
    out = F.scaled_dot_product_attention(queries, k, v, mask, scale=scale, enable_gqa=True)
    return out.transpose(1, 2), None


def _products(q: Tensor, q_rope: Tensor, keys: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Two batched products with all heads of a sequence as rows."""
    queries = torch.cat((q, q_rope), -1).flatten(1, 2)
    scores = (queries @ keys.transpose(1, 2)).unflatten(1, q.shape[1:3]).float() * scale
    if mask is not None:
        scores = scores + mask.transpose(1, 2)
    p = scores.softmax(-1).to(q.dtype)
    return (p.flatten(1, 2) @ keys[..., : q.shape[3]]).unflatten(1, q.shape[1:3])


_compiled_products = Compiled(_products)


def _compiled(
    q: Tensor, q_rope: Tensor, cache: Tensor, lengths: Tensor, block_table: Tensor | None, scale: float
) -> tuple[Tensor, None]:
    """What torch.compile makes the best of; it gives no lse."""
    return _compiled_products(q, q_rope, *_ready(q, cache, lengths, block_table), scale), None


def _model_sizes(model: Any) -> list[dict[str, int]]:
    if not model.kv_lora_rank:
        return []
    latent, _, rope, _ = model.mla_sizes()
    return [{"heads": model.query_heads, "latent": latent, "rope": rope, "context": 4096}]


@op(
    check=check, outputs=outputs, cost=cost, bucket=bucket, inputs=inputs, allowed=_ALLOWED, call_type=MlaDecodeCall,
    rounds_between=True, runtime=("scale",), check_runtime=check_scale, indices=indices, model_sizes=_model_sizes,
    kernels={
        "numba": "tilery.ops.attention.numba.forward:mla_decode",
        "triton": "tilery.ops.attention.triton.mla_decode:mla_decode",
        "cuda.hopper": "tilery.ops.attention.cuda.mla_decode:mla_decode",
        "cutile": "tilery.ops.attention.cutile.paged:mla_decode",
    },
    baselines=baselines(torch=_sdpa, compile=_compiled), cases=cases(),
)  # fmt: skip
def mla_decode(
    q: Tensor, q_rope: Tensor, cache: Tensor, lengths: Tensor, block_table: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """MLA of 1 to 16 new tokens in the latent: P = softmax(scale · [q, q_rope] · key), out = P · key[:L].

    q [B, Q, H, L] with the keys' projection absorbed, q_rope [B, Q, H, R]; cache [blocks, block_size, L + R] with
    block_table [B, most], as docs/kv_cache.md says, or [B, S, L + R] with None. lengths [B] counts the keys, those of
    the Q tokens among them: token t sees keys up to lengths - Q + t. out [B, Q, H, L], lse [B, H, Q]; a token that sees
    none has zeros and -inf; one that sees a page that is not there, or of a length that cannot be, NaN.
    A sequence gives the same bits in any batch.
    """
    out, lse = torch.full_like(q, torch.nan), q.new_full((q.shape[0], q.shape[2], q.shape[1]), torch.nan)
    max_keys = cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    for b, length in enumerate(lengths.tolist()):
        if not 0 <= length <= max_keys:
            continue
        if block_table is None:
            keys = cache[b]
        else:
            keys = in_order(cache, block_table[b, : -(-length // cache.shape[1])], torch.nan)
        for t in range(q.shape[1]):  # its heads are queries of one head, so that no key is copied for each
            seen = keys[: max(length - q.shape[1] + t + 1, 0)].unsqueeze(1)
            rows = torch.cat((q[b, t], q_rope[b, t]), -1).unsqueeze(1)
            made, sums = attend(rows, seen, seen[..., : q.shape[3]], scale)
            out[b, t], lse[b, :, t] = made[:, 0], sums[0]
    return out, lse
