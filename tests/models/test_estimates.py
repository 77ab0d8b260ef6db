"""Costs of what is no op yet, held against numbers made by hand."""

import pytest

from tilery.core.op import REGISTRY
from tilery.models.estimates import ESTIMATES, experts_hit


def test_experts_that_get_a_token():
    assert experts_hit(1, 256, 8) == 8 and experts_hit(5, 8, 8) == 8 and experts_hit(10**5, 256, 8) == 256
    assert experts_hit(2, 4, 2) == 3  # the second token repeats 2, 1 or 0 of the first one's: 1, 4 and 1 times in 6


@pytest.mark.parametrize(
    ("op", "params", "cost"),
    [
        ("fp8_grouped_matmul", {"m": 2, "n": 130, "k": 256, "experts": 9, "topk": 2, "gathered": True},
         (2 * 2 * 130 * 256, 256 + 8 + 2 * (130 * 256 + 16), 2 * 260)),  # one token: one row, two experts
        ("grouped_topk", {"m": 3, "n": 16, "k": 2}, (5 * 48, 2 * 48, 8 * 6)),
        ("expert_sort", {"m": 6, "experts": 9}, (0, 24, 60)),
        ("expert_sum", {"m": 3, "n": 10, "topk": 2, "shared": True}, (2 * 90, 2 * 90 + 4 * 6, 2 * 30)),
        ("expert_sum", {"m": 3, "n": 10, "topk": 2, "shared": False}, (2 * 60, 2 * 60 + 4 * 6, 2 * 30)),
        ("cache_write_", {"m": 3, "kv_heads": 2, "n": 8}, (0, 2 * 2 * 48 + 12, 2 * 2 * 48)),
        ("mla_cache_write_", {"m": 3, "n": 12}, (0, 2 * 36 + 12, 2 * 36)),
        ("all_reduce", {"m": 3, "n": 10, "ranks": 4}, (30, 60, 60)),
        ("all_gather", {"m": 3, "n": 10, "ranks": 4}, (0, 60, 240)),
    ],
)  # fmt: skip
def test_estimates_are_what_a_hand_makes_of_them(op, params, cost):
    assert ESTIMATES[op](**params) == cost


def test_no_estimate_outlives_its_op():
    there = sorted(set(ESTIMATES) & set(REGISTRY))
    assert not there, f"{there}: these are ops now; delete their estimates from models/estimates.py"
