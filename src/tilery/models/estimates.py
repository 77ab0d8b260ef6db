"""What steps cost that no op does yet: flops, reads and writes, the least that is needed; in bf16 unless they say fp8.

Once an op of such a name is in the registry its contract is asked instead, with the same parameters (see steps.py):
then its estimate here is dead and goes.
"""

from collections.abc import Callable
from typing import Any

from tilery.spec import Cost

_BYTES = 2  # of a bf16 value
_INDEX = 4  # of an int32


def _cost(flops: int, reads: int, writes: int) -> Cost:
    """Of numbers of values."""
    return Cost(flops, _BYTES * reads, _BYTES * writes)


def seen_pairs(m: int, window: int | None) -> int:
    """Pairs of query and key of one sequence of m tokens, where a token sees itself and what came before."""
    full = min(m, window or m)
    return full * (full + 1) // 2 + (m - full) * full


def attention(batch: int, m: int, heads: int, kv_heads: int, n: int, window: int | None = None) -> Cost:
    """Causal attention of prompts of m tokens, heads of n."""
    tokens = batch * m
    flops = 4 * batch * seen_pairs(m, window) * heads * n
    return _cost(flops, tokens * (heads + 2 * kv_heads) * n, tokens * heads * n)


def attention_decode(m: int, context: int, heads: int, kv_heads: int, n: int, window: int | None = None) -> Cost:
    """One query of each of m sequences against the cache of its context."""
    seen = m * min(context, window or context)
    return _cost(4 * seen * heads * n, m * heads * n + 2 * seen * kv_heads * n, m * heads * n)


def mla(batch: int, m: int, heads: int, nope: int, rope: int, value: int) -> Cost:
    """Causal attention of prompts with keys and values made of the latent; the turned part of a key is one for all."""
    tokens = batch * m
    flops = 2 * batch * seen_pairs(m, None) * heads * (nope + rope + value)
    reads = tokens * (heads * (nope + rope) + heads * (nope + value) + rope)
    return _cost(flops, reads, tokens * heads * value)


def mla_decode(m: int, context: int, heads: int, latent: int, rope: int) -> Cost:
    """Queries that have absorbed the keys' projection, against the latent cache itself."""
    reads = m * heads * (latent + rope) + m * context * (latent + rope)
    return _cost(2 * m * context * heads * (2 * latent + rope), reads, m * heads * latent)


def experts_hit(tokens: int, experts: int, topk: int) -> int:
    """How many of the experts get a token, where each token takes topk of them and all are as likely."""
    return round(experts * (1 - (1 - topk / experts) ** tokens))


def fp8_grouped_matmul(m: int, n: int, k: int, experts: int, topk: int, gathered: bool) -> Cost:
    """m rows, topk of every token, each times its expert's matrix; gathered: rows of a token are one row in memory.

    Values of a byte, a scale for 128 of a row and for 128 × 128 of a matrix.
    """
    tokens = m // topk
    rows, blocks = tokens if gathered else m, -(-n // 128) * -(-k // 128)
    weights = experts_hit(tokens, experts, topk) * (n * k + 4 * blocks)
    return Cost(2 * m * n * k, rows * (k + 4 * -(-k // 128)) + weights, _BYTES * m * n)


def grouped_topk(m: int, n: int, k: int) -> Cost:
    """The k best of n experts, chosen within the best groups; weights and indices of 4 bytes come out."""
    return Cost(5 * m * n, _BYTES * m * n, 2 * _INDEX * m * k)


def expert_sort(m: int, experts: int) -> Cost:
    """The order of m rows by expert, and where each expert begins."""
    return Cost(0, _INDEX * m, _INDEX * (m + experts))


def expert_sum(m: int, n: int, topk: int, shared: bool) -> Cost:
    """The weighted sum of a token's rows, and of what shared experts made."""
    rows = topk + shared
    return Cost(2 * m * n * rows, _BYTES * m * n * rows + 4 * m * topk, _BYTES * m * n)


def cache_write_(m: int, kv_heads: int, n: int) -> Cost:
    """Keys and values of m tokens to their slots."""
    return Cost(0, _BYTES * 2 * m * kv_heads * n + _INDEX * m, _BYTES * 2 * m * kv_heads * n)


def mla_cache_write_(m: int, n: int) -> Cost:
    """The latent and the turned part of the key, n values, of m tokens to their slots."""
    return Cost(0, _BYTES * m * n + _INDEX * m, _BYTES * m * n)


def add_bias_(m: int, n: int) -> Cost:
    return _cost(m * n, m * n + n, m * n)


def all_reduce(m: int, n: int, ranks: int) -> Cost:
    """In this rank's own memory: the links between GPUs are in no ceiling."""
    return _cost(m * n, m * n, m * n)


def all_gather(m: int, n: int, ranks: int) -> Cost:
    """As all_reduce; n columns come from each rank."""
    return _cost(0, m * n, m * n * ranks)


ESTIMATES: dict[str, Callable[..., Cost]] = {
    estimate.__name__: estimate
    for estimate in (
        attention, attention_decode, mla, mla_decode, fp8_grouped_matmul, grouped_topk, expert_sort,
        expert_sum, cache_write_, mla_cache_write_, add_bias_, all_reduce, all_gather,
    )
}  # fmt: skip


def estimated(op: str, params: dict[str, Any]) -> Cost:
    return ESTIMATES[op](**{name: value for name, value in params.items() if name != "dtype"})
