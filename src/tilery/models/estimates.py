"""What steps cost that no op does yet: flops, reads and writes, the least that is needed; in bf16 unless they say fp8.

Once an op of such a name is in the registry its contract is asked instead, with the same parameters (see steps.py):
then its estimate here is dead and goes.
"""

from collections.abc import Callable
from typing import Any

from tilery.base.spec import Cost

_BYTES = 2  # of a bf16 value
_INDEX = 4  # of an int32


def _cost(flops: int, reads: int, writes: int) -> Cost:
    """Cost from numbers of values that are read and written."""
    return Cost(flops, _BYTES * reads, _BYTES * writes)


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
    """Cost of an all_gather, counted as for all_reduce; n columns come from each rank."""
    return _cost(0, m * n, m * n * ranks)


ESTIMATES: dict[str, Callable[..., Cost]] = {
    estimate.__name__: estimate
    for estimate in (
        fp8_grouped_matmul, grouped_topk, expert_sort, expert_sum, cache_write_, mla_cache_write_, add_bias_,
        all_reduce, all_gather,
    )
}  # fmt: skip


def estimated(op: str, params: dict[str, Any]) -> Cost:
    return ESTIMATES[op](**{name: value for name, value in params.items() if name != "dtype"})
