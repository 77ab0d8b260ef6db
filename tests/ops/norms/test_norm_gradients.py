"""Rows of a program that a tensor does not have: they give the weight's gradient nothing, not even 0 times infinity."""

import pytest
import torch

import tilery
from cases import home


@pytest.mark.parametrize("centred", [False, True])
def test_absent_rows_add_nothing_to_a_weights_gradient(centred):
    """Without eps the scale of a row of zeros is infinite."""
    where = home("triton")
    dy, x, w = torch.randn(3, 64, device=where), torch.randn(3, 64, device=where), torch.randn(64, device=where)
    op = tilery.layer_norm_backward if centred else tilery.rms_norm_backward
    args = (dy, x, w, 0.0) if centred else (dy, x, w, 0.0, 0.0)
    config = op.kernel("triton").Config(rows=2, block=64, num_warps=1, programs=2)
    for found, wanted in zip(op(*args, backend="triton", config=config), op.reference(*args)):
        assert torch.allclose(found, wanted, atol=1e-4)
