"""argmax beyond its cases: of equal values the first is the largest, also where a row is read in several blocks."""

import pytest
import torch

import tilery
from cases import home
from tilery.core.op import REGISTRY


@pytest.mark.parametrize("places", [(5, 69), (5, 70), (63, 64), (0, 255), (100, 101)])
def test_of_equals_in_several_blocks_the_first_wins(places):
    x = torch.zeros(2, 256, device=home("triton"))
    x[:, list(places)] = 3.0
    config = REGISTRY["argmax"].kernel("triton").Config(block=64, num_warps=1)
    assert tilery.argmax(x, backend="triton", config=config).tolist() == [places[0]] * 2
