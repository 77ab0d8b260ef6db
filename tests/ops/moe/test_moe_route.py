"""Which experts are chosen and what they weigh: beside plain Python, and where numbers are at their limits."""

import math

import pytest
import torch

import tilery
from cases import home
from tilery.base.errors import BadInput
from tilery.base.spec import case
from tilery.core.op import REGISTRY
from tilery.measure.check import check_baseline

OP = REGISTRY["moe_route"]
KERNELS = pytest.mark.parametrize("kernel", ["numba", "triton"])
V3 = {"scoring": "sigmoid", "groups": 4, "top_groups": 2}


def route(kernel, logits, bias, k, **how):
    where = home(kernel)
    logits = torch.as_tensor(logits, dtype=torch.float32, device=where)
    bias = None if bias is None else torch.as_tensor(bias, dtype=torch.float32, device=where)
    weights, ids = tilery.moe_route(logits, bias, k, backend=kernel, **how)
    return weights.cpu(), ids.tolist()


def by_hand(logits, bias, k, groups, top_groups, scaling):
    """One token of DeepSeek-V3, in Python's own numbers."""
    scores = [1 / (1 + math.exp(-x)) for x in logits]
    ranked = [s + b for s, b in zip(scores, bias)]
    size = len(logits) // groups
    sums = [sum(sorted(ranked[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
    best = sorted(range(groups), key=lambda g: -sums[g])[:top_groups]
    ids = sorted((e for e in range(len(logits)) if e // size in best), key=lambda e: -ranked[e])[:k]
    total = sum(scores[e] for e in ids) + 1e-20
    return [scores[e] / total * scaling for e in ids], ids


@KERNELS
@pytest.mark.parametrize("seed", range(4))
def test_deepseek_v3_beside_plain_python(kernel, seed):
    args = OP.inputs(m=6, n=40, k=7, dtype="fp32", bias=True, device="cpu", seed=seed, scaling=2.5, **V3)
    weights, ids = route(kernel, args["logits"], args["bias"], 7, scaling=2.5, **V3)
    for row, logits in enumerate(args["logits"].tolist()):
        wanted, experts = by_hand(logits, args["bias"].tolist(), 7, 4, 2, 2.5)
        assert ids[row] == experts and torch.allclose(weights[row], torch.tensor(wanted), 1e-5)


@KERNELS
def test_a_groups_two_best_decide_and_not_its_best(kernel):
    """The largest of all is in a group whose second is poor."""
    logits = [[9.0, -9.0, 1.0, 1.5, -5.0, -6.0, 0.5, 2.0]]
    assert route(kernel, logits, None, 2, scoring="sigmoid", groups=4, top_groups=1)[1] == [[3, 2]]
    assert route(kernel, logits, None, 3, scoring="sigmoid", groups=4, top_groups=2)[1] == [[7, 3, 2]]


@KERNELS
def test_a_bias_chooses_and_does_not_weigh(kernel):
    weights, ids = route(kernel, [[0.0, 1.0, 2.0]], [4.0, 0.0, 0.0], 2, scoring="sigmoid", renormalize=False)
    assert ids == [[0, 2]] and torch.allclose(weights, torch.tensor([[0.0, 2.0]]).sigmoid())


@KERNELS
def test_a_negative_bias_does_not_let_other_groups_in(kernel):
    """Values below 0 are above those of groups that are out."""
    ids = route(kernel, [[3.0, 3.5, 1.0, 0.5]], [-8.0, -8.0, -9.0, -9.0], 2, scoring="sigmoid", groups=2)[1]
    assert ids == [[1, 0]]
    ids = route(kernel, [[3.0, -math.inf, 1.0, 0.5]], None, 2, scoring="sigmoid", groups=2, renormalize=False)[1]
    assert ids == [[2, 3]]


@KERNELS
def test_the_softmax_of_the_chosen_is_a_renormalised_softmax(kernel):
    logits = torch.randn(5, 32, generator=torch.Generator().manual_seed(3))
    after, before = (route(kernel, logits, None, 4, scoring=scoring) for scoring in ("softmax_topk", "softmax"))
    assert after[1] == before[1] and torch.allclose(after[0], before[0], 1e-5)
    assert torch.allclose(after[0], torch.softmax(logits.topk(4).values, -1), 1e-5)


@KERNELS
def test_topk_softmax_is_one_form_of_it(kernel):
    logits = torch.randn(9, 60, device=home(kernel)).mul(3).round()  # with equal ones
    for renormalize in (True, False):
        weights, ids = tilery.topk_softmax(logits, 5, renormalize, backend=kernel)
        made = route(kernel, logits, None, 5, renormalize=renormalize)
        assert ids.tolist() == made[1] and torch.allclose(weights.cpu(), made[0], 1e-5)


@KERNELS
def test_scores_of_nothing_weigh_nothing(kernel):
    """Renormalised they would be 0 / 0 without the 1e-20."""
    weights, ids = route(kernel, torch.full((2, 6), -math.inf), None, 3, scoring="sigmoid")
    assert ids == [[0, 1, 2]] * 2 and (weights == 0).all()


@KERNELS
def test_nan_is_chosen_first_and_stays_with_its_token(kernel):
    logits = torch.zeros(3, 6)
    logits[1, 4] = math.nan
    weights, ids = route(kernel, logits, None, 2, scoring="sigmoid", renormalize=False)
    assert ids == [[0, 1], [4, 0], [0, 1]]
    assert weights[1].isnan().tolist() == [True, False] and not weights[[0, 2]].isnan().any()


@KERNELS
def test_values_that_round_to_one_score_are_chosen_by_themselves(kernel):
    """Their sigmoids are 1 in fp32."""
    assert route(kernel, [[30.0, 40.0, 50.0, 35.0]], None, 2, scoring="sigmoid")[1] == [[2, 1]]


@pytest.mark.parametrize("how", [{}, V3 | {"bias": True}, {"scoring": "softmax_topk"}, {"renormalize": False}])
def test_torch_agrees(how):
    assert check_baseline(OP, "baseline:torch", case(m=40, n=64, k=6, dtype="fp32", **how), "cpu").errors


@pytest.mark.parametrize(
    ("logits", "bias", "k", "how", "message"),
    [
        (torch.ones(2, 1025), None, 2, {}, r"N from 1 to 1024, got \[2, 1025\]"),
        (torch.ones(2, 8), None, 9, {}, "k must be 1 to 8, .* got 9"),
        (torch.ones(2, 8), None, 0, {}, "k must be 1 to 8, .* got 0"),
        (torch.ones(2, 8), None, 5, {"groups": 4, "top_groups": 2}, "k must be 1 to 4, .* got 5"),
        (torch.ones(2, 8), None, 2, {"groups": 3}, "groups must be 1 or divide the 8 experts .* got 3"),
        (torch.ones(2, 8), None, 2, {"groups": 8}, "groups of 2 or more, got 8"),
        (torch.ones(2, 8), None, 2, {"groups": 0}, "groups must be 1 or divide .* got 0"),
        (torch.ones(2, 8), None, 2, {"groups": 2, "top_groups": 3}, "top_groups must be 1 to groups = 2, got 3"),
        (torch.ones(2, 8), None, 2, {"scoring": "relu"}, "one of softmax, sigmoid, softmax_topk, got 'relu'"),
        (torch.ones(2, 8), None, 2, {"scoring": "softmax_topk", "renormalize": False}, "must be True .* got False"),
        (torch.ones(2, 8), torch.ones(7), 2, {}, r"bias must be fp32\[8\], .* got fp32\[7\]"),
        (torch.ones(2, 8), torch.ones(16)[::2], 2, {}, "bias must be contiguous, got stride 2"),
        (torch.ones(8, 2).t(), None, 2, {}, "logits must have stride 1"),
    ],
)
def test_bad_input_is_named(logits, bias, k, how, message):
    with pytest.raises(BadInput, match=f"moe_route: .*{message}"):
        tilery.moe_route(logits, bias, k, **how)
