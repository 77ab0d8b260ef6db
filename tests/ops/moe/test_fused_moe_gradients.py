"""Gradients of fused_moe: every argument and form against float64, the same bits again, no more than is asked for."""

import pytest
import torch
from torch import Tensor

from tilery.core.call import Call
from tilery.core.op import REGISTRY, Op

OP = REGISTRY["fused_moe"]
SIZES = {"m": 20, "n": 24, "k": 40, "experts": 5, "topk": 2}
OSS = {"interleaved": True, "biases": True, "limit": 0.7, "alpha": 1.702, "up_offset": 1.0}
ALLOWED = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 2e-2}  # gate, up, h and their gradients are rounded between products


def gradients(call, args, dtype):
    given = [a.to(dtype).requires_grad_() if is_float(a) and dtype else a for a in args]
    if dtype is None:
        given = [a.detach().clone().requires_grad_() if is_float(a) else a for a in args]
    out = call(*given)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out)
    names = [name for name, a in zip(OP.names, given) if is_float(a)]
    return dict(zip(names, torch.autograd.grad((out * weights).sum(), [a for a in given if is_float(a)])))


def is_float(a):
    return isinstance(a, Tensor) and a.is_floating_point()


def drawn(**params):
    return OP.complete((), OP.inputs(**(SIZES | params), device="cpu", seed=3))


@pytest.mark.parametrize("dtype", ALLOWED)
@pytest.mark.parametrize(
    "params",
    [
        {"biases": True, "add": True},
        OSS,
        {"limit": 0.5},
        {"away": 9, "biases": True, "add": True},
        {"outside": True, "biases": True},
        {"m": 1, "experts": 9},
        {"spread": "one", "topk": 1},
        {"layout_b": "transposed", "layout": "padded"},
    ],
    ids=str,
)
def test_gradients_are_right(params, dtype):
    """Clamped in fp32 alone: what rounds to the other side of the limit has another gradient."""
    if dtype != "fp32" and "limit" in params:
        params = params | {"limit": 7.0}
    args = drawn(**params, dtype=dtype)
    found, wanted = gradients(OP, args, None), gradients(OP.reference, args, torch.float64)
    for name, theirs in wanted.items():
        assert (found[name] - theirs).norm() <= ALLOWED[dtype] * theirs.norm(), name


def test_no_tokens_have_no_gradient():
    found = gradients(OP, drawn(m=0, biases=True, add=True, dtype="fp32"), None)
    assert all((g == 0).all() for g in found.values()) and found["w_down"].numel()


def test_it_gives_the_same_bits_again():
    args = drawn(m=50, biases=True, dtype="fp32")
    first = gradients(OP, args, None)
    for _ in range(3):
        again = gradients(OP, args, None)
        assert all(torch.equal(first[name], again[name]) for name in first)


def test_weights_of_experts_without_tokens_have_the_gradient_zero_and_reach_none():
    args = drawn(biases=True, dtype="fp32")
    args[4].remainder_(3)
    for i in (1, 2, 5, 6):
        args[i][3:] = float("nan")
    found = gradients(OP, args, None)
    assert all(g.isfinite().all() for g in found.values())
    assert all((found[name][3:] == 0).all() for name in ("w_gate_up", "w_down", "b_gate_up", "b_down"))


@pytest.mark.parametrize(
    ("needed", "products"),
    [
        ({"add"}, []),
        ({"weights"}, ["grouped_matmul"] * 2),
        ({"b_down"}, ["grouped_matmul"] * 2 + ["grouped_matmul_backward"]),
        ({"x"}, ["grouped_matmul"] * 3),
        ({"w_gate_up"}, ["grouped_matmul"] * 2 + ["grouped_matmul_backward"]),
    ],
    ids=str,
)
def test_no_gradient_is_computed_that_nobody_asked_for(needed, products, monkeypatch):
    made, call = [], Op.__call__

    def counted(self, *args, **kwargs):
        made.append(self.name)
        return call(self, *args, **kwargs)

    args = drawn(biases=True, add=True, dtype="fp32")
    y = OP(*args)
    monkeypatch.setattr(Op, "__call__", counted)
    found = OP.backward(OP.given(args, (y,)), Call({"y": torch.ones_like(y), "needed": frozenset(needed)}))
    assert set(found) == needed and [name for name in made if name != "moe_align"] == products
