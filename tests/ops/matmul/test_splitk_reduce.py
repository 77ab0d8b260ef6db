"""Parts of a sum: added in their order, rounded once."""

import pytest
import torch

import tilery
from tilery.base.errors import BadInput, NoBackward
from tilery.core.op import REGISTRY
from tilery.measure.place import place

OP = REGISTRY["splitk_reduce"]


@pytest.mark.parametrize(
    ("parts", "out_dtype", "message"),
    [
        (torch.ones(2, 3, 4).half(), "bf16", "splitk_reduce: parts must be fp32, got fp16"),
        (torch.ones(3, 4), "bf16", r"parts must be \[S, M, N\], got shape \[3, 4\]"),
        (torch.ones(2, 3, 8)[:, :, ::2], "bf16", r"must have N contiguous, got strides \[24, 8, 2\]; call .contig"),
        (torch.ones(2, 3, 4), "e4m3", "out_dtype must be one of fp32, fp16, bf16, got 'e4m3'"),
    ],
)
def test_bad_input_is_named(parts, out_dtype, message):
    with pytest.raises(BadInput, match=message):
        tilery.splitk_reduce(parts, out_dtype)


def test_a_gradient_is_refused():
    with pytest.raises(NoBackward, match="splitk_reduce has no backward and parts requires grad"):
        tilery.splitk_reduce(torch.ones(2, 3, 4, requires_grad=True))


@pytest.mark.parametrize("kernel", ["numba", "triton"])
@pytest.mark.parametrize("count", [2, 7, 8, 13])
def test_parts_are_added_in_their_order(kernel, count):
    """To the bit: in fp32 another order rounds otherwise."""
    where = place(OP, kernel).device
    if where is None:
        pytest.skip("needs a GPU")
    parts = torch.randn(count, 3, 50, generator=torch.Generator().manual_seed(count)).to(where)
    total = torch.zeros(3, 50, device=where)
    for part in parts:
        total += part
    assert torch.equal(tilery.splitk_reduce(parts, "fp32", backend=kernel), total)
    if kernel == "numba" or where.type == "cuda":  # Triton's interpreter has no bf16
        assert torch.equal(tilery.splitk_reduce(parts, backend=kernel), total.bfloat16())


def test_rows_of_a_wider_matrix_are_taken_as_they_lie():
    parts = torch.randn(3, 4, 64)[:, :, :40]
    assert torch.allclose(tilery.splitk_reduce(parts, "fp32"), parts.sum(0), atol=1e-6)
