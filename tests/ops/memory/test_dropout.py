"""Dropout: its random numbers are Philox's, and a seed gives one mask, forwards and backwards."""

import pytest
import torch

import tilery
from tilery.base.errors import BadInput
from tilery.ops.memory import philox

WORD = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("seed", "counter", "expected"),
    [
        (0, 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),  # published with the generator
    ],
)
def test_words_are_those_of_philox(seed, counter, expected):
    found = philox.words(seed, torch.tensor([counter & WORD]), torch.tensor([counter >> 32]))
    assert tuple(int(word) for word in found) == expected


def test_a_key_is_two_signed_words():
    for seed, low, high in ((1, 1, 0), (-1, -1, -1), (2**31 + 2**40, -(2**31), 256)):
        assert (philox.low_key(seed), philox.high_key(seed)) == (low, high)


def test_the_gradient_has_the_same_mask():
    x = torch.randn(7, 130, requires_grad=True)
    y = tilery.dropout(x, 0.3, 11)
    y.sum().backward()
    assert torch.equal(x.grad == 0, y == 0) and torch.allclose(x.grad[y != 0], torch.tensor(1 / 0.7))


def test_a_seed_gives_one_mask_whatever_the_shape():
    x = torch.ones(64, 1000)
    y = tilery.dropout(x, 0.25, 5)
    assert torch.equal(y, tilery.dropout(x, 0.25, 5))
    assert torch.equal(y.view(-1), tilery.dropout(x.view(-1), 0.25, 5))
    assert not torch.equal(y, tilery.dropout(x, 0.25, 6))
    assert not torch.equal(y, tilery.dropout(x, 0.25, 5 + 2**32))


def test_as_many_fall_as_asked():
    dropped = (tilery.dropout(torch.ones(1000, 1000), 0.1, 3) == 0).double().mean().item()
    assert abs(dropped - 0.1) < 5 * (0.1 * 0.9 / 1e6) ** 0.5


@pytest.mark.parametrize("p", [-0.1, 1.5, float("nan")])
def test_p_is_a_probability(p):
    with pytest.raises(BadInput, match="p must be 0 to 1"):
        tilery.dropout(torch.ones(4), p, 0)
