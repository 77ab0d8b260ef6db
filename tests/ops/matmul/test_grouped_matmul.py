"""Ragged groups: sizes that are the device's, rows that belong to none, offsets that lie, and lists of tensors."""

import pytest
import torch

import tilery
from tilery import languages
from tilery.base.errors import BadInput
from tilery.base.spec import case
from tilery.core.cases import call_for
from tilery.core.op import REGISTRY
from tilery.measure.check import check, check_baseline
from tilery.measure.place import place
from tilery.ops.matmul.grouped_matmul import groups_hit

OP, MATMUL = REGISTRY["grouped_matmul"], REGISTRY["matmul"]
KERNELS = pytest.mark.parametrize("kernel", ["numba", "triton"])


def device_of(kernel):
    where = place(OP, kernel).device
    if where is None:
        pytest.skip("needs a GPU")
    return where


def int32(*values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize(
    ("a", "b", "offsets", "message"),
    [
        (torch.ones(5), torch.ones(2, 4, 3), int32(2, 5), r"a must be \[T, K\], 2 dimensions, got shape \[5\]"),
        (torch.ones(5, 4), torch.ones(4, 3), int32(2, 5), r"b must be \[G, K, N\], 3 dimensions, got shape \[4, 3\]"),
        (torch.ones(5, 4), torch.ones(2, 3, 4), int32(2, 5), r"must agree in K, got \[5, 4\] and \[2, 3, 4\]"),
        (torch.ones(5, 4), torch.ones(2, 4, 3), int32(2), r"offsets must be int32\[2\], .* got int32\[1\]"),
        (torch.ones(5, 4), torch.ones(2, 4, 3), int32(2, 5).long(), r"offsets must be int32\[2\], .* got int64\[2\]"),
        (torch.ones(5, 4), torch.ones(2, 4, 3), int32(2, 0, 5, 0)[::2], "offsets must be contiguous, got stride 2"),
        (torch.ones(5, 4), torch.ones(2, 4, 3).half(), int32(2, 5), "b must be fp32 as a is, got fp16"),
    ],
)
def test_bad_input_is_named(a, b, offsets, message):
    with pytest.raises(BadInput, match=f"grouped_matmul: .*{message}"):
        tilery.grouped_matmul(a, b, offsets)


@pytest.mark.parametrize(
    ("dc", "a", "offsets", "message"),
    [
        (torch.ones(5), torch.ones(5, 4), int32(2, 5), r"dc must be \[T, N\], 2 dimensions, got shape \[5\]"),
        (torch.ones(5, 3), torch.ones(4, 4), int32(2, 5), r"must agree in T, got \[5, 3\] and \[4, 4\]"),
        (torch.ones(5, 3).half(), torch.ones(5, 4), int32(2, 5), "dc must be fp32 as a is, got fp16"),
        (torch.ones(5, 3), torch.ones(5, 4), int32(2, 5).long(), r"offsets must be int32\[G\], .* got int64\[2\]"),
        (torch.ones(5, 3), torch.ones(5, 4), int32(2, 0, 5, 0)[::2], "offsets must be contiguous, got stride 2"),
    ],
)
def test_bad_input_of_the_backward_is_named(dc, a, offsets, message):
    with pytest.raises(BadInput, match=f"grouped_matmul_backward: .*{message}"):
        tilery.grouped_matmul_backward(dc, a, offsets)


def test_one_group_costs_what_matmul_says_and_its_offset():
    sizes = {"m": 24, "n": 40, "k": 56, "dtype": "bf16"}
    one, plain = OP.cost(call_for(OP, case(experts=1, **sizes))), MATMUL.cost(call_for(MATMUL, case(**sizes)))
    assert one == plain._replace(reads=plain.reads + 4)


def test_groups_that_get_a_row():
    assert [groups_hit(rows, 256) for rows in (0, 1, 8, 10**5)] == [0, 1, 8, 256] and groups_hit(5, 0) == 0
    assert groups_hit(2, 2) == 2 and groups_hit(100, 1) == 1  # 1.5, rounded to even


def test_tiles_are_counted_with_their_half_full_ends():
    def expected(rows, groups, height):
        return call_for(OP, case(m=rows, n=8, k=8, experts=groups)).tiles_expected(height)

    assert expected(4096, 32, 128) == 48 and expected(4096, 32, 64) == 80
    assert expected(8, 256, 16) == 8 and expected(0, 4, 16) == expected(5, 0, 16) == 0


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("m", "experts"), [(16, 32), (128, 128), (1000, 8), (1, 5), (0, 3), (4, 0)])
def test_drawn_sizes_read_what_the_cost_says(m, experts, seed):
    offsets = OP.inputs(m=m, n=8, k=8, experts=experts, dtype="fp32", device="cpu", seed=seed)["offsets"]
    sizes = offsets.diff(prepend=int32(0))
    assert offsets.dtype == torch.int32 and len(offsets) == experts and (sizes >= 0).all()
    assert int((sizes > 0).sum()) == groups_hit(m, experts) and sizes.sum() == (m if experts else 0)


def test_seeds_draw_other_sizes():
    drawn = [OP.inputs(m=64, n=8, k=8, experts=8, device="cpu", seed=s)["offsets"].tolist() for s in range(4)]
    assert (
        len(set(map(tuple, drawn))) == 4
        and OP.inputs(m=64, n=8, k=8, experts=8, device="cpu")["offsets"].tolist() == drawn[0]
    )


def test_sizes_that_do_not_fit_the_rows_are_named():
    with pytest.raises(BadInput, match=r"sizes must be 2 of 4 rows at most, got '3\+2'"):
        OP.inputs(m=4, n=8, k=8, experts=2, sizes="3+2", device="cpu")


@KERNELS
def test_many_tiles_of_uneven_groups(kernel):
    """Groups of more rows of tiles than run together, of one tile, of none; rows past the last group, also many."""
    Config = OP.kernel(kernel).Config
    small = Config(16, 16, 16, 4, 2) if kernel == "triton" else Config(12, 32, True)
    for sizes in ("150+0+16+17+1", "0+0+0+0+3", "1+1+1+1+1"):
        problem = case(m=200, n=50, k=40, experts=5, dtype="fp32", sizes=sizes)
        assert check(OP, kernel, problem, device_of(kernel), config=small).refused is None


@pytest.mark.parametrize("kernel", OP.kernels)
@pytest.mark.parametrize("offsets", [(9, 20), (-5, 3), (7, 2), (2**31 - 1, -(2**31)), (0, 100), (-(2**31), 10)])
def test_offsets_that_lie_give_nan_and_reach_no_other_memory(kernel, offsets):
    """They cannot be checked without waiting for the device. Every row is written, and nothing that is not c's."""
    if why := languages.missing(kernel):
        pytest.skip(why)
    where, dtype = device_of(kernel), torch.float16 if kernel == "cuda.hopper" else torch.float32
    store = torch.full((4, 10, 24), 7.0, device=where, dtype=dtype)
    a = torch.full((30, 16), float("nan"), device=where, dtype=dtype)[10:20].fill_(1.0)
    b, c = torch.ones(2, 16, 24, device=where, dtype=dtype), store[1]
    tilery.grouped_matmul(a, b, int32(*offsets, device=where), backend=kernel, out=c)
    assert (store[0] == 7).all() and (store[2:] == 7).all() and c.isnan().all()


@KERNELS
@pytest.mark.parametrize("offsets", [(9, 20), (-5, 3), (7, 2), (2**31 - 1, -(2**31)), (0, 100), (-(2**31), 10)])
def test_offsets_that_lie_give_a_gradient_of_nan_and_reach_no_other_memory(kernel, offsets):
    where = device_of(kernel)
    store, dc = torch.full((4, 2, 16, 24), 7.0, device=where), torch.ones(10, 24, device=where)
    a, db = torch.ones(10, 16, device=where), store[1]
    tilery.grouped_matmul_backward(dc, a, int32(*offsets, device=where), backend=kernel, out=db)
    assert (store[0] == 7).all() and (store[2:] == 7).all() and db.isnan().all()


@KERNELS
def test_many_tiles_of_uneven_groups_backward(kernel):
    """Groups of many blocks of rows, of one, of none; matrices of several tiles each way; rows past the last group."""
    op = REGISTRY["grouped_matmul_backward"]
    small = op.kernel(kernel).Config(16, 16, 16, 4, 2) if kernel == "triton" else op.kernel(kernel).Config(12, 32, True)
    for sizes in ("150+0+16+17+1", "0+0+0+0+3", "1+1+1+1+1"):
        problem = case(m=200, n=50, k=40, experts=5, dtype="fp32", sizes=sizes)
        assert check(op, kernel, problem, device_of(kernel), config=small).refused is None


@pytest.mark.parametrize("name", ["baseline:torch", "baseline:loop"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_torch_agrees_on_the_gradient(name, dtype):
    problem = case(m=40, n=24, k=32, experts=6, dtype=dtype)
    assert check_baseline(REGISTRY["grouped_matmul_backward"], name, problem, "cpu").errors


@pytest.mark.parametrize("name", ["baseline:torch", "baseline:loop"])
@pytest.mark.parametrize("layout_b", ["contiguous", "transposed"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_torch_agrees(name, layout_b, dtype):
    problem = case(m=40, n=24, k=32, experts=6, dtype=dtype, layout_b=layout_b)
    assert check_baseline(OP, name, problem, "cpu").errors


def test_models_with_experts_have_sizes():
    from tilery import models

    assert OP.model_sizes(models.load("qwen3-30b-a3b")) == [
        {"n": 1536, "k": 2048, "experts": 128}, {"n": 2048, "k": 768, "experts": 128},
    ]  # fmt: skip
    assert OP.model_sizes(models.load("llama-8b")) == []


# Lists


def pairs(rows=(3, 0, 5), k=16, n=8):
    return [torch.randn(m, k) for m in rows], [torch.randn(k, n) for _ in rows]


def right(made, a, b):
    return len(made) == len(a) and all(torch.allclose(c, x @ y, atol=1e-5) for c, x, y in zip(made, a, b))


def test_a_list_is_one_product():
    a, b = pairs()
    assert right(tilery.grouped_matmul_list(a, b), a, b) and tilery.grouped_matmul_list([], []) == []
    assert right(tilery.grouped_matmul_list(a[:1], b[:1], backend="numba"), a[:1], b[:1])


def test_a_list_compiles_without_a_graph_break():
    a, b = pairs()
    compiled = torch.compile(lambda *both: tilery.grouped_matmul_list(*both), fullgraph=True, backend="aot_eager")
    assert right(compiled(a, b), a, b)


@pytest.mark.parametrize("turned", [False, True])
def test_parts_of_one_tensor_are_not_copied(turned, monkeypatch):
    a, weights = torch.randn(8, 16).split([3, 0, 5]), torch.randn(3, 8, 16) if turned else torch.randn(3, 16, 8)
    b = [w.t() for w in weights] if turned else list(weights.unbind())
    monkeypatch.setattr(torch, "cat", None)
    monkeypatch.setattr(torch, "stack", None)
    assert right(tilery.grouped_matmul_list(a, b), a, b)


def test_what_only_looks_like_parts_of_one_tensor_is_copied():
    whole, weights = torch.randn(8, 16), torch.randn(3, 16, 8)
    a, b = [whole[3:6], whole[:3], whole[6:]], [weights[0], weights[2], weights[1]]
    assert right(tilery.grouped_matmul_list(a, b), a, b)
    again = [weights[0]] * 3
    assert right(tilery.grouped_matmul_list(a, again), a, again)


@pytest.mark.parametrize("parts", [True, False])
def test_a_list_has_the_gradients_of_its_parts(parts):
    """Parts of one tensor too: a view over all of them would give the first alone a gradient."""
    whole, weights = torch.randn(8, 16, requires_grad=True), torch.randn(3, 16, 8, requires_grad=True)
    a, b = whole.split([3, 0, 5]), weights.unbind()
    if not parts:
        a, b = [x.clone() for x in a], [w.clone() for w in b]
    found, wanted = (
        torch.autograd.grad(sum(c.square().sum() for c in made), (whole, weights))
        for made in (tilery.grouped_matmul_list(a, b), [x @ w for x, w in zip(a, b)])
    )
    assert all(torch.allclose(ours, theirs, atol=1e-3) for ours, theirs in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ([torch.ones(2, 3)], [], r"must be as many matrices, got a of fp32\[2, 3\] and b of nothing"),
        ([torch.ones(3)], [torch.ones(3, 4)], r"must be as many matrices, got a of fp32\[3\]"),
        ([7], [torch.ones(3, 4)], "must be as many matrices, got a of int"),
        ([torch.ones(2, 3)] * 2, [torch.ones(3, 4), torch.ones(3, 5)], "must have one K, N and dtype, .* call matmul"),
        ([torch.ones(2, 3), torch.ones(2, 4)], [torch.ones(3, 4)] * 2, "must have one K, N and dtype"),
        ([torch.ones(2, 3), torch.ones(2, 3).half()], [torch.ones(3, 4)] * 2, "must have one K, N and dtype"),
    ],
)
def test_lists_that_are_not_one_product_are_named(a, b, message):
    with pytest.raises(BadInput, match=f"grouped_matmul_list: .*{message}"):
        tilery.grouped_matmul_list(a, b)
