"""Gated activations: packed is the same as apart, gradients too, and GELU's tails are as exact as its middle."""

import pytest
import torch

import tilery
from tilery.base.errors import BadInput

OPS = pytest.mark.parametrize(
    ("op", "more"),
    [(tilery.silu_mul, ()), (tilery.gelu_mul, ("tanh",)), (tilery.gelu_mul, ("none",))],
    ids=["silu", "gelu-tanh", "gelu-none"],
)


@OPS
def test_packed_is_the_same_as_apart(op, more):
    x, dy = torch.randn(5, 2 * 130), torch.randn(5, 130)
    packed, gate, up = (t.clone().requires_grad_() for t in (x, *x.chunk(2, -1)))
    y, same = op(packed, None, *more), op(gate, up, *more)
    assert torch.equal(y, same)
    y.backward(dy)
    same.backward(dy)
    assert torch.equal(packed.grad, torch.cat((gate.grad, up.grad), -1))


@OPS
def test_every_value_is_right_relative_to_itself(op, more):
    """An error over all values would hide the small ones: gelu(-9) is -1e-18."""
    gate = torch.linspace(-9, 9, 4001)
    found = op(gate, torch.ones_like(gate), *more).double()
    expected = op.reference(gate.double(), torch.ones(4001, dtype=torch.float64), *more)
    error = ((found - expected) / expected).abs()[expected != 0]
    assert error.max() < 1e-5


def test_what_cannot_be_halved_is_refused():
    with pytest.raises(BadInput, match=r"gate must be \[..., 2N\]"):
        tilery.silu_mul(torch.randn(3, 5))


def test_an_unknown_gelu_is_named():
    with pytest.raises(BadInput, match="approximate must be one of tanh, none, got 'erf'"):
        tilery.gelu_mul(torch.randn(3, 4), approximate="erf")
