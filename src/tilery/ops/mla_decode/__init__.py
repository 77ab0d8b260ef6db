from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tilery.base.errors import require
from tilery.base.spec import Bucket, Cost, TensorSpec, case, dtype_name
from tilery.core.op import op
from tilery.core.peers import Compiled, baselines
from tilery.parts import kv_cache, paged_peers
from tilery.parts.attention import attend, pairs
from tilery.parts.attention_checks import check_scale
from tilery.parts.attention_indices import require_pages
from tilery.parts.mla_decode_cases import draw
from tilery.parts.paged_attention import in_order

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LATENTS, ROPES = (16, 32, 64, 128, 256, 512), (16, 32, 64)
MOST_QUERIES = 16


class Sizes(NamedTuple):
    batch: int
    queries: int
    heads: int
    latent: int
    rope: int
    block: int  # tokens of a block of the cache; 0 where it is contiguous
    bound: int  # tokens that a sequence may have


def sizes(q: Any, q_rope: Any, cache: Any, block_table: Any) -> Sizes:
    """Of tensors or specs that passed `check`."""
    batch, queries, heads, latent = q.shape
    block = 0 if block_table is None else cache.shape[1]
    bound = block_table.shape[1] * block if block else cache.shape[1]
    return Sizes(batch, queries, heads, latent, q_rope.shape[3], block, bound)


def check(
    q: TensorSpec, q_rope: TensorSpec, cache: TensorSpec, lengths: TensorSpec, block_table: TensorSpec | None
) -> None:
    _check_queries(q, q_rope)
    batch, _, _, latent = q.shape
    width = latent + q_rope.shape[3]
    require(cache.dtype == q.dtype, f"cache must be {dtype_name(q.dtype)} as q is, got {dtype_name(cache.dtype)}")
    first = f"{batch}, S" if block_table is None else "blocks, block_size"
    what = f"[{first}, {width}], {latent} of the latent and {width - latent} of the turned part"
    fits = len(cache.shape) == 3 and cache.shape[2] == width and (block_table is not None or cache.shape[0] == batch)
    hint = "; a paged one needs block_table" if block_table is None else ""
    require(fits, f"cache must be {what}, got {list(cache.shape)}{hint}")
    require(cache.stride(2) == 1, f"cache must have stride 1 along its last dimension, got {cache.stride(2)}")
    _check_integers("lengths", lengths, (batch,))
    if block_table is not None:
        known = ", ".join(map(str, kv_cache.BLOCK_SIZES))
        require(
            cache.shape[1] in kv_cache.BLOCK_SIZES,
            f"cache must have a block_size of {known}, got {cache.shape[1]}",
        )
        most = block_table.shape[1] if len(block_table.shape) == 2 else -1
        _check_integers("block_table", block_table, (batch, most))


def _check_queries(q: TensorSpec, q_rope: TensorSpec) -> None:
    known = ", ".join(map(dtype_name, DTYPES))
    require(q.dtype in DTYPES, f"q must be one of {known}, got {dtype_name(q.dtype)}")
    require(q_rope.dtype == q.dtype, f"q_rope must be {dtype_name(q.dtype)} as q is, got {dtype_name(q_rope.dtype)}")
    fits = len(q.shape) == 4 and q.shape[3] in LATENTS and q.shape[2] > 0
    latents, ropes = (", ".join(map(str, known)) for known in (LATENTS, ROPES))
    require(fits, f"q must be [B, Q, H, L] with a head or more and L of {latents}, got {list(q.shape)}")
    many = q.shape[1]
    require(1 <= many <= MOST_QUERIES, f"q must have 1 to {MOST_QUERIES} queries of a sequence, got {many}")
    fits = len(q_rope.shape) == 4 and q_rope.shape[:3] == q.shape[:3] and q_rope.shape[3] in ROPES
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


def outputs(q: TensorSpec, *_: Any) -> tuple[TensorSpec, ...]:
    batch, queries, heads = q.shape[:3]
    lse = TensorSpec.contiguous((batch, heads, queries), torch.float32, q.device)
    return TensorSpec.contiguous(q.shape, q.dtype, q.device), lse


def indices(
    q: Tensor, q_rope: Tensor, cache: Tensor, lengths: Tensor, block_table: Tensor | None, scale: float
) -> None:
    require_pages(lengths, block_table, cache, sizes(q, q_rope, cache, block_table).bound, q.shape[1])


def cost(
    q: TensorSpec, q_rope: TensorSpec, cache: TensorSpec, lengths: TensorSpec, block_table: TensorSpec | None
) -> Cost:
    """As if every sequence were as long as it may be: lengths are on the device."""
    s = sizes(q, q_rope, cache, block_table)
    width = s.latent + s.rope
    out, lse = outputs(q)
    flops = 2 * s.batch * s.heads * pairs(s.queries, s.bound, True, 0) * (width + s.latent)
    keys = s.batch * s.bound * width * cache.dtype.itemsize
    return Cost(flops, q.nbytes + q_rope.nbytes + keys, out.nbytes + lse.nbytes)


def bucket(
    q: TensorSpec, q_rope: TensorSpec, cache: TensorSpec, lengths: TensorSpec, block_table: TensorSpec | None
) -> Bucket:
    """Without the batch: a config cuts sequences, and how one is cut must not depend on its neighbours."""
    s = sizes(q, q_rope, cache, block_table)
    exact = f"h={s.heads},q={s.queries},latent={s.latent},rope={s.rope},block={s.block},{dtype_name(q.dtype)}"
    return Bucket(exact=exact, scaled={"context": s.bound})


def allowed(q: TensorSpec, *_: Any) -> dict[torch.dtype, float]:
    """Weights are rounded to q's dtype before they meet values, the output once more; lse is fp32 in any case."""
    return {torch.float32: 2e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}


# Peers and cases


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
    weights = scores.softmax(-1).to(q.dtype)
    return (weights.flatten(1, 2) @ keys[..., : q.shape[3]]).unflatten(1, q.shape[1:3])


_compiled_products = Compiled(_products)


def _compiled(
    q: Tensor, q_rope: Tensor, cache: Tensor, lengths: Tensor, block_table: Tensor | None, scale: float
) -> tuple[Tensor, None]:
    """What torch.compile makes the best of; it gives no lse."""
    return _compiled_products(q, q_rope, *_ready(q, cache, lengths, block_table), scale), None


_FAR = {"cutile": "below 2**31"}
_SMALL: dict[str, Any] = {"heads": 3, "latent": 32, "rope": 16}
_DEEPSEEK: dict[str, Any] = {"latent": 512, "rope": 64}
_BENCH: dict[str, Any] = {**_DEEPSEEK, "block_size": 64, "dtype": "bf16"}


@op(
    check=check, outputs=outputs, cost=cost, bucket=bucket, inputs=draw, allowed=allowed,
    rounds_between=True, runtime=("scale",),
    check_runtime=check_scale,
    kernels=("numba", "triton", "cutile"), baselines=baselines(torch=_sdpa, compile=_compiled),
    model_sizes=lambda model: _model_sizes(model), indices=indices,
    cases={
        "test": [
            case(m=2, context=70, block_size=64, dtype="fp32", **_SMALL),
            case(m=2, context=70, block_size=64, dtype="fp16", **_SMALL),
            case(m=2, context=70, block_size=64, dtype="bf16", **_SMALL),
            case(m=2, context=130, block_size=64, dtype="fp16", **_DEEPSEEK, heads=16),
            case(m=1, context=40, block_size=64, dtype="bf16", queries=2, **_DEEPSEEK, heads=70),  # these fill no tile
            case(m=5, context=90, dtype="fp16", queries=4, block_size=16, lengths="ragged", **_SMALL),
            case(m=4, context=150, dtype="fp32", block_size=32, lengths="ragged", **_SMALL),
            case(m=4, context=90, dtype="bf16", queries=3, block_size=256, lengths="ragged", **_SMALL),
            case(m=4, context=90, dtype="fp16", queries=2, lengths="ragged", **_SMALL),  # contiguous
            case(m=2, context=33, dtype="fp32", queries=16, **_SMALL),
            case(m=2, context=600, heads=2, latent=16, rope=16, dtype="fp32", block_size=128),  # in several pieces
            case(m=4, context=40, dtype="fp16", queries=2, wrong="l0:-1+l1:41+l2:1073741824", **_SMALL),
            case(
                m=6, context=48, queries=3, dtype="fp16", block_size=16, **_SMALL,
                wrong="t1:-1+t5:21+t6:2147483647+t11:-2147483648+t14:21+l4:33",
            ),  # the fifth has a page that its last query alone sees
            case(m=2, context=600, heads=2, latent=16, rope=16, dtype="fp32", block_size=128, wrong="l0:601+t7:-1"),
            case(m=1, context=1, block_size=64, heads=8, latent=16, rope=16, dtype="fp32"),  # one key
            case(m=2, context=0, dtype="fp32", **_SMALL),  # no key at all
            case(m=2, context=0, block_size=64, dtype="fp16", **_SMALL),
            case(m=0, context=16, block_size=64, dtype="fp32", **_SMALL),  # nothing to launch
            case(m=3, context=80, block_size=64, dtype="fp32", logits=1e4, lengths="ragged", **_SMALL),
            case(m=2, context=70, block_size=64, dtype="fp16", layout="padded", queries=2, **_SMALL),
            case(m=2, context=70, block_size=64, dtype="fp16", layout="misaligned", **_SMALL),
            case(_FAR, m=1, context=40, dtype="fp16", layout="far", block_size=16, **_SMALL),
            case(m=2, context=40, block_size=64, dtype="fp32", special="nan", **_SMALL),
        ],
        "bench": [
            *(case(m=m, context=4096, heads=heads, **_BENCH) for heads in (128, 16) for m in (1, 16, 128)),
            case(m=1, context=32768, heads=128, **_BENCH),
            case(m=16, context=8192, heads=16, queries=4, **_BENCH),
        ],
        "bench_cpu": [
            case(m=4, context=1024, heads=16, **_BENCH | {"dtype": dtype}) for dtype in ("fp32", "bf16")
        ],
    },
)  # fmt: skip
def mla_decode(
    q: Tensor, q_rope: Tensor, cache: Tensor, lengths: Tensor, block_table: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """MLA of 1 to 16 new tokens in the latent: weights = softmax(scale · [q, q_rope] · key), out = weights · key[:L].

    q [B, Q, H, L] with the keys' projection absorbed, q_rope [B, Q, H, R]; cache [blocks, block_size, L + R] with
    block_table [B, most], as docs/kv_cache.md says, or [B, S, L + R] with None. lengths [B] counts the keys, those of
    the Q tokens among them: token t sees keys up to lengths - Q + t. out [B, Q, H, L], lse [B, H, Q]; a token that sees
    none has zeros and -inf; one that sees a page that is not there, or of a length that cannot be, NaN.
    A sequence gives the same bits in any batch.
    """
    out, lse = torch.full_like(q, torch.nan), q.new_full((q.shape[0], q.shape[2], q.shape[1]), torch.nan)
    for s, length in enumerate(lengths.tolist()):
        if not 0 <= length <= sizes(q, q_rope, cache, block_table).bound:
            continue
        keys = (
            cache[s]
            if block_table is None
            else in_order(cache, block_table[s, : -(-length // cache.shape[1])], torch.nan)
        )
        for t in range(q.shape[1]):  # its heads are queries of one head, so that no key is copied for each
            seen = keys[: max(length - q.shape[1] + t + 1, 0)].unsqueeze(1)
            rows = torch.cat((q[s, t], q_rope[s, t]), -1).unsqueeze(1)
            made, sums = attend(rows, seen, seen[..., : q.shape[3]], scale)
            out[s, t], lse[s, :, t] = made[:, 0], sums[0]
    return out, lse


def _model_sizes(model: Any) -> list[dict[str, int]]:
    if not model.kv_lora_rank:
        return []
    latent, _, rope, _ = model.mla_sizes()
    return [{"heads": model.query_heads, "latent": latent, "rope": rope, "context": 4096}]
