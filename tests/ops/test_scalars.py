"""Numbers that have no meaning are refused by name, at every call: also one whose plan is there already."""

import math
import re

import pytest
import torch

import tilery
from tilery.base.errors import BadInput

X, W, TARGETS, VALUES = torch.randn(3, 8), torch.randn(8), torch.tensor([0, 1, 2]), torch.randn(3)
HEADS, COS, SIN = torch.randn(1, 3, 2, 8), torch.rand(3, 4), torch.rand(3, 4)
WEIGHT = torch.randn(5, 8)

NORMS = {
    "rms_norm": lambda **how: tilery.rms_norm(X, W, **how),
    "add_rms_norm": lambda **how: tilery.add_rms_norm(X, X, W, **how),
    "rms_norm_fp8": lambda **how: tilery.rms_norm_fp8(X, W, **how),
    "add_rms_norm_fp8": lambda **how: tilery.add_rms_norm_fp8(X, X, W, **how),
    "layer_norm": lambda **how: tilery.layer_norm(X, W, W, **how),
    "rms_norm_backward": lambda eps=1e-6, offset=0.0: tilery.rms_norm_backward(X, X, W, eps, offset),
    "add_rms_norm_backward": lambda eps=1e-6, offset=0.0: tilery.add_rms_norm_backward(X, X, X, W, eps, offset),
    "layer_norm_backward": lambda eps=1e-5: tilery.layer_norm_backward(X, X, W, eps),
    "qk_norm_rope_": lambda **how: tilery.qk_norm_rope_(HEADS.clone(), HEADS.clone(), W, W, COS, SIN, **how),
}
LOSSES = {
    "cross_entropy": lambda **how: tilery.cross_entropy(X, TARGETS, **how),
    "cross_entropy_backward": lambda **how: tilery.cross_entropy_backward(VALUES, VALUES, X, TARGETS, VALUES, **how),
    "fused_linear_cross_entropy": lambda **how: tilery.fused_linear_cross_entropy(X, WEIGHT, TARGETS, **how),
    "fused_linear_cross_entropy_backward": lambda **how: tilery.fused_linear_cross_entropy_backward(
        VALUES, VALUES, X, WEIGHT, TARGETS, VALUES, **how
    ),
}
SAMPLE = {"sample": lambda **how: tilery.sample(X, 5, **how)}
DROPOUT = {"dropout": lambda p=0.5: tilery.dropout(X, p, 5)}
IDS = torch.zeros(3, 1, dtype=torch.int32)
ROUTE = {"moe_route": lambda **how: tilery.moe_route(X, None, 2, **how)}
EXPERTS = {
    "fused_moe": lambda **how: tilery.fused_moe(
        X, torch.ones(1, 4, 8), torch.ones(1, 8, 2), torch.ones(3, 1), IDS, **how
    )
}
CALLS = NORMS | LOSSES | SAMPLE | DROPOUT | ROUTE | EXPERTS

NAN, INF = math.nan, math.inf
REFUSED = [  # whose, which, what, and how it is said
    (NORMS, "eps", (-1e-6, NAN, INF), "eps must be 0 or more and finite"),
    ([name for name in NORMS if "layer" not in name], "offset", (NAN, INF), "offset must be finite"),
    (LOSSES, "label_smoothing", (2.0, -0.1, NAN), "label_smoothing must be from 0 to 1"),
    (LOSSES, "z_loss", (-1.0, NAN, INF), "z_loss must be 0 or more and finite"),
    (SAMPLE, "temperature", (INF, -INF, NAN, 1e-40, 1e40), "temperature must be 0 or less"),
    (SAMPLE, "top_k", (-1,), "top_k must be 0, which keeps all, or more"),
    (SAMPLE, "top_p", (-0.1, 1.1, NAN), "top_p must be from 0 to 1"),
    (SAMPLE, "min_p", (-0.1, 2.0, NAN), "min_p must be from 0, which keeps all, to 1"),
    (DROPOUT, "p", (-0.1, 1.1, NAN), "p must be 0 to 1"),
    (ROUTE, "scaling", (NAN, INF), "scaling must be finite"),
    (EXPERTS, "limit", (-1.0, NAN, INF), "limit must be 0, which is none, or more and finite"),
    (EXPERTS, "alpha", (NAN, INF), "alpha must be finite"),
    (EXPERTS, "up_offset", (NAN, -INF), "up_offset must be finite"),
]


@pytest.mark.parametrize(
    ("name", "scalar", "values", "message"), [(name, *rest) for names, *rest in REFUSED for name in names]
)
def test_it_is_refused_by_name(name, scalar, values, message):
    CALLS[name]()  # its plan is made, and asked for again
    for value in values:
        with pytest.raises(BadInput, match=f"^{name}: {message}.*, got {re.escape(str(value))}$"):
            CALLS[name](**{scalar: value})


@pytest.mark.parametrize("scalar", [{"eps": 0}, {"eps": 0.0}, {"eps": 3}])
def test_zero_and_integers_are_numbers(scalar):
    assert torch.allclose(tilery.rms_norm(X, W, **scalar), tilery.rms_norm.reference(X, W, **scalar), atol=1e-5)


def test_it_is_refused_where_nothing_is_launched():
    with pytest.raises(BadInput, match="label_smoothing must be from 0 to 1, got 2"):
        tilery.cross_entropy(torch.ones(0, 4), torch.ones(0, dtype=torch.int64), label_smoothing=2)
