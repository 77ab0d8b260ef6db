"""Products of several matrices: what is asked of them, what they cost, and many tiles of many matrices."""

import pytest
import torch

import tilery
from tilery.base.errors import BadInput
from tilery.base.spec import case
from tilery.core import policy
from tilery.core.cases import call_for
from tilery.core.op import REGISTRY
from tilery.measure.check import check, check_baseline
from tilery.measure.place import place

BMM, MATMUL = REGISTRY["bmm"], REGISTRY["matmul"]


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (torch.ones(2, 3), torch.ones(2, 3, 4), r"bmm: a must be \[B, M, K\], 3 dimensions, got shape \[2, 3\]"),
        (torch.ones(2, 3, 4), torch.ones(3, 4, 5), r"must agree in B and K, got \[2, 3, 4\] and \[3, 4, 5\]"),
        (torch.ones(2, 3, 4), torch.ones(2, 5, 4), r"must agree in B and K, got \[2, 3, 4\] and \[2, 5, 4\]"),
        (torch.ones(2, 3, 4), torch.ones(2, 4, 5).half(), "bmm: b must be fp32 as a is, got fp16"),
        (torch.ones(2, 3, 4).long(), torch.ones(2, 4, 5), "bmm: a must be fp32, fp16, bf16, got int64"),
        (torch.ones(2, 3, 8)[:, :, ::2], torch.ones(2, 4, 5),
         r"stride 1 along one of its last two dimensions, got strides \[24, 8, 2\]; call .contiguous\(\) on it"),
        (torch.ones(1, 3, 4).expand(2, 3, 4), torch.ones(2, 4, 5), "a must not be expanded, got stride 0"),
    ],
)  # fmt: skip
def test_bad_input_is_named(a, b, message):
    with pytest.raises(BadInput, match=message):
        tilery.bmm(a, b)


def test_one_matrix_costs_what_matmul_says():
    sizes = {"m": 24, "n": 40, "k": 56, "dtype": "bf16"}
    one = BMM.cost(call_for(BMM, case(batch=1, **sizes)))
    assert one == MATMUL.cost(call_for(MATMUL, case(**sizes)))
    assert BMM.cost(call_for(BMM, case(batch=3, **sizes))) == tuple(3 * part for part in one)


def test_heads_of_packed_tensors_are_taken_as_they_lie():
    """As latent attention has them: the batch is a dimension in the middle."""
    q, w = torch.randn(5, 3, 16), torch.randn(3, 16, 24)
    c = tilery.bmm(q.transpose(0, 1), w)
    assert torch.allclose(c, torch.einsum("thk,hkn->htn", q, w), atol=1e-5)


@pytest.mark.parametrize("kernel", ["numba", "triton"])
def test_many_tiles_of_many_matrices(kernel):
    """More rows of tiles than a group has, the last one partly filled, and several columns of them."""
    where = place(BMM, kernel).device
    if where is None:
        pytest.skip("needs a GPU")
    Config = BMM.kernel(kernel).Config
    problem = case(batch=3, m=150, n=70, k=40, dtype="fp32")
    small = Config(16, 16, 16, 4, 2) if kernel == "triton" else Config(12, 32, True)
    assert check(BMM, kernel, problem, where, config=small).refused is None


def test_configs_that_cannot_be_are_refused():
    call = call_for(BMM, case(batch=2, m=32, n=32, k=32, dtype="fp16"), "cpu")
    tiles = BMM.kernel("numba").Config(7, 32, False)
    assert "is not made of register tiles" in policy.problem_refusal(BMM, "numba", call, tiles)


@pytest.mark.parametrize("layout_b", ["contiguous", "transposed"])
def test_torch_agrees(layout_b):
    problem = case(batch=3, m=20, n=24, k=32, dtype="fp32", layout_b=layout_b)
    assert check_baseline(BMM, "baseline:torch", problem, "cpu").errors


def test_models_with_a_latent_have_sizes():
    from tilery import models

    assert BMM.model_sizes(models.load("deepseek-v3")) == [
        {"batch": 128, "n": 512, "k": 128}, {"batch": 128, "n": 128, "k": 512},
    ]  # fmt: skip
    assert BMM.model_sizes(models.load("llama-8b")) == []
