"""What attention costs at least, held against numbers made by hand: two products, each tensor once."""

import pytest

from tilery.base.spec import Cost, case
from tilery.core.cases import call_for
from tilery.core.op import REGISTRY


def cost(op, **more):
    params = {"m": 3, "keys": 5, "heads": 4, "kv_heads": 2, "n": 32, "value": 16, "dtype": "fp16", "batch": 2} | more
    return REGISTRY[op].cost(call_for(REGISTRY[op], case(**params), "cpu"))


@pytest.mark.parametrize(("causal", "pairs"), [(False, 3 * 5), (True, 3 + 4 + 5)])
def test_cost_is_what_a_hand_makes_of_it(causal, pairs):
    flops = 2 * 2 * 4 * pairs * (32 + 16)  # two a multiplication, sequences, heads, pairs, sizes of both products
    reads = 2 * 2 * (3 * 4 * 32 + 5 * 2 * 32 + 5 * 2 * 16)  # bytes, sequences, tokens · heads · size of q, k and v
    writes = 2 * 2 * 3 * 4 * 16
    assert cost("attention", causal=causal) == Cost(flops, reads, writes)
    assert cost("attention_lse", causal=causal) == Cost(flops, reads, writes + 4 * 2 * 4 * 3)
