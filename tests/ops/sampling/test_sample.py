"""Tokens follow the distribution that was asked for, and a seed gives the same ones again."""

import math

import pytest
import torch

import tilery.ops
from tilery.base.errors import BadInput
from tilery.core.op import REGISTRY
from tilery.measure.place import place

SAMPLE = REGISTRY["sample"]
LOGITS = torch.linspace(-2, 2, 24)


def drawn(rows, kernel="numba", seed=11, logits=LOGITS, **numbers):
    where = place(SAMPLE, kernel).device
    return SAMPLE(logits.to(where).repeat(rows, 1), seed, backend=kernel, **numbers).cpu()


def chi_square(tokens, p):
    """How far counts are from p, in standard deviations of the chi-square distribution; tokens of no share are none."""
    counts = torch.bincount(tokens, minlength=len(p)).double()
    assert counts[p == 0].sum() == 0
    expected, counts = p[p > 0] * len(tokens), counts[p > 0]
    freedom = max(len(counts) - 1, 1)
    return (((counts - expected) ** 2 / expected).sum().item() - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("seed", [0, 1, 2**40 + 7, -3])
def test_tokens_follow_softmax(seed):
    assert chi_square(drawn(20000, seed=seed, temperature=0.7), torch.softmax(LOGITS.double() / 0.7, -1)) < 4


def test_tokens_of_many_seeds_follow_softmax():
    """One row and many seeds: as a decoder draws, step by step."""
    x = LOGITS[None]
    tokens = torch.cat([tilery.sample(x, seed) for seed in range(3000)])
    assert chi_square(tokens, torch.softmax(LOGITS.double(), -1)) < 4


def test_a_wrong_temperature_is_seen():
    assert chi_square(drawn(20000, temperature=0.7), torch.softmax(LOGITS.double() / 0.8, -1)) > 10


@pytest.mark.parametrize(
    ("numbers", "kept"),
    [({"top_k": 5}, 5), ({"top_p": 0.5}, 4), ({"min_p": 0.3}, 7), ({"top_k": 5, "top_p": 0.6}, 3)],
    ids=str,
)
def test_only_the_kept_are_drawn(numbers, kept):
    p = torch.softmax(LOGITS.double(), -1)
    p[:-kept] = 0
    assert chi_square(drawn(5000, **numbers), p / p.sum()) < 4


@pytest.mark.parametrize("kernel", ["numba", "triton"])
def test_top_p_is_a_share_of_what_top_k_leaves(kernel):
    """0.3 and 0.25 are left: the first is more than half of them, though not of all."""
    logits = torch.tensor([0.3, 0.25, *[0.015] * 30]).log()
    assert drawn(40, kernel, logits=logits, top_k=2, top_p=0.5).unique().tolist() == [0]
    assert drawn(40, kernel, logits=logits, top_k=2, top_p=0.6).unique().tolist() == [0, 1]


def test_kernels_draw_the_same():
    for numbers in ({}, {"temperature": 1.5, "top_k": 10, "top_p": 0.8}):
        assert torch.equal(drawn(20, "numba", **numbers), drawn(20, "triton", **numbers))


@pytest.mark.parametrize("seed", [-(2**63), -(2**32), -1, 0, 1, 16, 2**31, 2**32 + 1, 2**63 - 1])
def test_every_integer_is_a_seed(seed):
    """With the same numbers in every kernel and in the reference; top_k may be as large."""
    right = SAMPLE.reference(LOGITS.double().repeat(20, 1), seed)
    for kernel in ("numba", "triton"):
        for top_k in (0, 2**31, 2**63 - 1):
            assert torch.equal(drawn(20, kernel, seed=seed, top_k=top_k), right), (kernel, top_k)


def test_a_seed_gives_the_same_again_and_another_does_not():
    assert torch.equal(drawn(100), drawn(100))
    assert not torch.equal(drawn(100), drawn(100, seed=12))


def test_rows_differ():
    assert len(drawn(100).unique()) > 5


def test_values_equal_to_the_last_kept_are_kept():
    tied = torch.tensor([0.0, 3.0, 3.0, 3.0, -1.0])
    assert set(drawn(200, logits=tied, top_k=1).tolist()) == {1, 2, 3}


def test_a_row_of_nothing_gives_0():
    nothing = torch.full((9,), -float("inf"))
    for kernel in ("numba", "triton"):
        assert drawn(2, kernel, logits=nothing, top_p=0.9).tolist() == [0, 0]


def test_a_seed_is_needed():
    with pytest.raises(BadInput, match="seed"):
        tilery.sample(LOGITS[None])
