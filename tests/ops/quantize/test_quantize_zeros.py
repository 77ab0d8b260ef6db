"""A group of zeros has a scale like any other: its values are zeros again, not NaN."""

import pytest
import torch

import tilery
from cases import home


@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("per", ["tensor", "token", "group", "block"])
@pytest.mark.parametrize("backend", ["numba", "triton"])
def test_zeros_are_quantized_to_zeros(backend, per, pow2):
    x = torch.zeros(3, 256, device=home(backend))
    values, scales = tilery.quantize_fp8(x, per=per, pow2=pow2, backend=backend)
    assert (values.float() == 0).all() and (scales > 0).all() and scales.isfinite().all()
