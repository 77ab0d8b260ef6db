"""Assignments sorted by expert: beside plain Python, with ids and maps that lie, and cut into small blocks."""

import pytest
import torch

import tilery
from cases import home
from tilery.base.errors import BadInput
from tilery.base.spec import case
from tilery.core.op import REGISTRY
from tilery.measure.check import check, check_baseline

OP = REGISTRY["moe_align"]
KERNELS = pytest.mark.parametrize("kernel", ["numba", "triton"])


def int32(values, where="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=where)


def by_hand(ids, expert_map, experts, block):
    flat = [e for row in ids for e in row]
    if expert_map is not None:
        flat = [expert_map[e] if 0 <= e < len(expert_map) else -1 for e in flat]
    order, offsets, counts, of_block = [], [0], [], []
    for expert in range(experts):
        own = [i for i, e in enumerate(flat) if e == expert]
        order += own + [len(flat)] * (-len(own) % block)
        of_block += [expert] * (-(-len(own) // block))
        offsets.append(len(order))
        counts.append(len(own))
    blocks = (len(flat) + min(experts, len(flat)) * (block - 1)) // block
    order += [len(flat)] * (blocks * block - len(order))
    inverse = [order.index(i) if i in order else -1 for i in range(len(flat))]
    return order, inverse, offsets, counts, of_block + [-1] * (blocks - len(of_block))


@KERNELS
@pytest.mark.parametrize("block", [1, 4, 16])
@pytest.mark.parametrize(
    ("ids", "expert_map", "experts"),
    [
        ([[2, 0], [0, 1], [2, 2]], None, 4),
        ([[5, 0], [3, 2], [9, -1], [1, 5]], [1, -1, 7, 0, 0, 2], 3),
        ([[2**31 - 1, 0], [-(2**31), 1]], None, 2),
        ([[3]] * 9, None, 5),
        ([[7, 8]] * 3, None, 2),  # none is here
    ],
)
def test_it_is_what_plain_python_makes(kernel, block, ids, expert_map, experts):
    where = home(kernel)
    known = None if expert_map is None else int32(expert_map, where)
    made = tilery.moe_align(int32(ids, where), known, experts, block, backend=kernel)
    assert tuple(x.flatten().tolist() for x in made) == by_hand(ids, expert_map, experts, block)


@KERNELS
def test_ids_and_maps_that_lie_are_not_followed(kernel):
    """Beside the map stand numbers that would be experts."""
    where = home(kernel)
    memory = int32([1] * 30, where)
    expert_map = memory[10:20].fill_(0)
    ids = int32([[-1, 10], [-5, 11], [2**31 - 1, -(2**31)], [9, 0]], where)
    _, inverse, _, counts, _ = tilery.moe_align(ids, expert_map, 2, backend=kernel)
    assert counts.tolist() == [2, 0] and inverse.tolist() == [[-1, -1]] * 3 + [[0, 1]]


def test_many_rounds_of_a_program():
    Config = OP.kernel("triton").Config
    for problem in (case(m=77, topk=3, experts=5, block=16), case(m=65, topk=2, experts=9, away=7, block=1)):
        assert check(OP, "triton", problem, home("triton"), config=Config(32, 1)).refused is None


@pytest.mark.parametrize("how", [{}, {"block": 16}, {"away": 9, "outside": True}, {"block": 7, "spread": "one"}])
def test_torch_agrees(how):
    assert check_baseline(OP, "baseline:torch", case(m=30, topk=3, experts=6, **how), "cpu").errors


def test_models_with_experts_have_sizes():
    from tilery import models

    assert OP.model_sizes(models.load("qwen3-30b-a3b")) == [{"topk": 8, "experts": 128}]
    assert OP.model_sizes(models.load("llama-8b")) == []


@pytest.mark.parametrize(
    ("ids", "expert_map", "experts", "block", "message"),
    [
        (int32([1, 2]), None, 4, 1, r"ids must be int32\[T, k\], got int32\[2\]"),
        (int32([[1, 2]]).long(), None, 4, 1, r"ids must be int32\[T, k\], got int64\[1, 2\]"),
        (int32([[1, 2], [3, 4]]).t(), None, 4, 1, "ids must be contiguous, got strides"),
        (int32([[], []]), None, 4, 1, r"k from 1 on, got \[2, 0\]"),
        (int32([[1]]), int32([[1]]), 4, 1, r"expert_map must be int32\[G\], got int32\[1, 1\]"),
        (int32([[1]]), None, 0, 1, "experts must be 1 to 1024, .* got 0"),
        (int32([[1]]), None, 1025, 1, "experts must be 1 to 1024, .* got 1025"),
        (int32([[1]]), None, 4, 0, "block must be 1 or more, got 0"),
        (int32([[1, 2]]), None, 4, 2**31, "at most 2147483647 slots"),
    ],
)
def test_bad_input_is_named(ids, expert_map, experts, block, message):
    with pytest.raises(BadInput, match=f"moe_align: .*{message}"):
        tilery.moe_align(ids, expert_map, experts, block)
