"""The gradient of a table: sums over many ids, rows longer than a block, and ids that are in no row."""

import pytest
import torch

import tilery
from tilery.base.errors import BadInput
from tilery.base.spec import case
from tilery.core.op import REGISTRY
from tilery.languages.numba_stream import BLOCK
from tilery.measure.check import check, check_baseline

OP = REGISTRY["embedding_backward"]
BACKENDS = pytest.mark.parametrize("backend", ["numba", "triton"])  # tensors are made where it runs: ops/conftest.py


@pytest.mark.parametrize(
    ("dy", "ids", "v", "message"),
    [
        (torch.ones(3, 4), torch.tensor([1, 2]), 5, r"dy must be .* a row for each id \[2\], got \[3, 4\]"),
        (torch.ones(2, 4), torch.tensor([1.0, 2.0]), 5, "ids must be int32 or int64, got fp32"),
        (torch.ones(2, 4), torch.tensor([1, 2]), -1, "v must be 0 or more, the rows of the table, got -1"),
        (torch.ones(2, 4).long(), torch.tensor([1, 2]), 5, "dy must be one of fp32, fp16, bf16, got int64"),
    ],
)
def test_bad_input_is_named(dy, ids, v, message):
    with pytest.raises(BadInput, match=f"embedding_backward: .*{message}"):
        tilery.embedding_backward(dy, ids, v)


@BACKENDS
def test_rows_longer_than_a_block(backend):
    dy, ids = torch.randn(5, 2 * BLOCK + 3), torch.tensor([2, 0, 2, 2, 0])
    assert torch.allclose(tilery.embedding_backward(dy, ids, 4, backend=backend), OP.reference(dy, ids, 4), atol=1e-5)


@BACKENDS
def test_ids_of_no_row_add_nothing(backend):
    """Neither those outside of the table nor those that a block of ids lacks; what they would bring is infinite."""
    dy = torch.full((3, 8), float("inf"))
    dy[1] = 2.0
    found = tilery.embedding_backward(dy, torch.tensor([-1, 0, 5]), 5, backend=backend)
    assert found.tolist() == [[2.0] * 8] + [[0.0] * 8] * 4


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_torch_agrees(dtype):
    assert check_baseline(OP, "baseline:torch", case(m=40, n=16, v=7, dtype=dtype), "cpu").errors


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_row_that_most_ids_name(dtype):
    """As a token that is in every sentence has: a sum of thousands."""
    assert check(OP, "numba", case(m=5000, n=16, v=2, dtype=dtype), "cpu").refused is None


def test_autograd_gives_it():
    table, ids = torch.randn(6, 8, requires_grad=True), torch.tensor([[1, 5, 1], [0, 1, 4]])
    (found,) = torch.autograd.grad(tilery.embedding(ids, table).square().sum(), table)
    (wanted,) = torch.autograd.grad(torch.nn.functional.embedding(ids, table).square().sum(), table)
    assert torch.allclose(found, wanted, atol=1e-5)
