"""With TILERY_CHECK_INDICES=1 the first integer that leads outside of a tensor is named."""

import pytest
import torch

import tilery
from tilery.base import settings
from tilery.base.errors import BadInput
from tilery.core.op import REGISTRY

LOGITS, X, WEIGHT = torch.randn(3, 8), torch.randn(3, 4), torch.randn(8, 4)
VALUES = torch.randn(3)
COS, SIN = torch.rand(6, 8), torch.rand(6, 8)
HEADS, PACKED = torch.randn(1, 3, 2, 16), torch.randn(3, 2, 16)
W16 = torch.ones(16)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def caches():
    return torch.zeros(2, 16, 2, 16), torch.zeros(2, 16, 2, 16)


def write(positions, slots):
    return lambda: tilery.rope_cache_write_(
        PACKED.clone(), PACKED, PACKED, *caches(), COS, SIN, torch.tensor(positions), torch.tensor(slots)
    )


WRONG = {
    "embedding": (
        lambda: tilery.embedding(torch.tensor([[0, 7], [2**62, 8]]), WEIGHT),
        rf"embedding: ids\[1, 0\] must be from 0 to 7, got {2**62}",
    ),
    "cross_entropy": (
        lambda: tilery.cross_entropy(LOGITS, torch.tensor([0, -100, 8])),
        r"cross_entropy: targets\[2\] must be from 0 to 7 or -100, got 8",
    ),
    "cross_entropy_backward": (
        lambda: tilery.cross_entropy_backward(
            VALUES, VALUES, LOGITS, torch.tensor([0, -7, -100]), VALUES, ignore_index=-7
        ),
        r"cross_entropy_backward: targets\[2\] must be from 0 to 7 or -7, got -100",
    ),
    "fused_linear_cross_entropy": (
        lambda: tilery.fused_linear_cross_entropy(X, WEIGHT, torch.tensor([-(2**63), 0, 0])),
        rf"fused_linear_cross_entropy: targets\[0\] must be from 0 to 7 or -100, got {-(2**63)}",
    ),
    "fused_linear_cross_entropy_backward": (
        lambda: tilery.fused_linear_cross_entropy_backward(VALUES, VALUES, X, WEIGHT, torch.tensor([1, 2, 9]), VALUES),
        r"fused_linear_cross_entropy_backward: targets\[2\] must be from 0 to 7 or -100, got 9",
    ),
    "rope": (
        lambda: tilery.rope(HEADS, HEADS, COS, SIN, torch.tensor([[0, 6, 1]])),
        r"rope: positions\[0, 1\] must be from 0 to 5, got 6",
    ),
    "rope_": (
        lambda: tilery.rope_(HEADS.clone(), HEADS.clone(), COS, SIN, torch.tensor([[0, 1, -1]])),
        r"rope_: positions\[0, 2\] must be from 0 to 5, got -1",
    ),
    "rope_backward": (
        lambda: tilery.rope_backward(PACKED, PACKED, COS, SIN, int32(0, 1, 99), "thd"),
        r"rope_backward: positions\[2\] must be from 0 to 5, got 99",
    ),
    "qk_norm_rope_": (
        lambda: tilery.qk_norm_rope_(HEADS.clone(), HEADS.clone(), W16, W16, COS, SIN, torch.tensor([[0, 1, 6]])),
        r"qk_norm_rope_: positions\[0, 2\] must be from 0 to 5, got 6",
    ),
    "rope_cache_write_": (
        write([0, 1, 2], [-1, 31, 32]),
        r"rope_cache_write_: slots\[2\] must be from 0 to 31 or -1, got 32",
    ),
    "embedding_backward": (
        lambda: tilery.embedding_backward(torch.ones(3, 4), torch.tensor([1, 7, 9]), 8),
        r"embedding_backward: ids\[2\] must be from 0 to 7, got 9",
    ),
    "grouped_matmul": (
        lambda: tilery.grouped_matmul(torch.ones(5, 4), torch.ones(2, 4, 3), int32(2, 6)),
        r"grouped_matmul: offsets\[1\] must be from 0 to 5, got 6",
    ),
    "grouped_matmul_backward": (
        lambda: tilery.grouped_matmul_backward(torch.ones(5, 3), torch.ones(5, 4), int32(-1, 5)),
        r"grouped_matmul_backward: offsets\[0\] must be from 0 to 5, got -1",
    ),
    "fused_moe": (
        lambda: tilery.fused_moe(
            X[:2], torch.ones(2, 6, 4), torch.ones(2, 4, 3), torch.ones(2, 1), int32(0, 2).view(2, 1)
        ),
        r"fused_moe: ids\[1, 0\] must be from -1 to 1, got 2",
    ),
    "moe_align": (
        lambda: tilery.moe_align(int32(0, -1, 2).view(3, 1), None, 2),
        r"moe_align: ids\[2, 0\] must be from -1 to 1, got 2",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_first_wrong_entry_is_named(name):
    call, message = WRONG[name]
    call()  # nobody looks
    with settings.override(check_indices=True), pytest.raises(BadInput, match=message):
        call()


def test_falling_offsets_and_positions_of_the_cache_are_named_too():
    with settings.override(check_indices=True):
        with pytest.raises(BadInput, match=r"offsets\[2\] must be 4 or more, as the entry before, got 3"):
            tilery.grouped_matmul(torch.ones(5, 4), torch.ones(3, 4, 3), int32(1, 4, 3))
        with pytest.raises(BadInput, match=r"positions\[1\] must be from 0 to 5, got 7"):
            write([0, 7, 2], [0, 1, 2])()


def test_a_map_of_experts_is_looked_at_too():
    ids = int32(0, 1, 2).view(3, 1)
    with settings.override(check_indices=True):
        tilery.moe_align(ids, int32(-1, 0, 1), 2)
        with pytest.raises(BadInput, match=r"moe_align: expert_map\[1\] must be from -1 to 1, got 2"):
            tilery.moe_align(ids, int32(-1, 2, 1), 2)
        with pytest.raises(BadInput, match=r"moe_align: ids\[2, 0\] must be from -1 to 1, got 2"):
            tilery.moe_align(ids, int32(-1, 1), 2)


def test_every_op_that_reads_indices_is_here():
    """Ops that take integer tensors; those of attention are tested with it."""
    mine = {op.name for op in REGISTRY.values() if op.indices is not None}
    assert {name for name in mine if "attention" not in name and "mla" not in name} == set(WRONG)


@pytest.mark.parametrize("name", WRONG)
def test_what_is_right_passes(name):
    """The cases that lie nowhere outside, some of which ignore rows and skip tokens."""
    op = REGISTRY[name]
    right = [c for c in op.cases["test"] if c.params.get("layout") != "far" and not is_wrong(c.params)][:8]
    with settings.override(check_indices=True):
        for problem in right:
            op(**op.inputs(**problem.params, device="cpu", seed=2), backend="numba")


def is_wrong(params):
    return params.get("outside") or params.get("wrong") or "outside" in params.get("places", "") or params.get("v") == 0
