"""Gradients of products: every dtype and layout against float64, and no product more than is asked for."""

import pytest
import torch
from torch import Tensor

import tilery
from tilery.core.op import REGISTRY, Op
from tilery.ops.matmul.contract import ALLOWED

MATRICES = [(a, b) for a in ("contiguous", "transposed") for b in ("contiguous", "transposed")]
CASES = [
    *(("matmul", {"m": 33, "n": 40, "k": 24, "layout": a, "layout_b": b}) for a, b in MATRICES),
    *(("bmm", {"batch": 3, "m": 9, "n": 40, "k": 24, "layout": a, "layout_b": b}) for a, b in MATRICES),
    ("matmul_add", {"m": 33, "n": 40, "k": 24, "alpha": 0.5, "beta": -2.0}),
    ("matmul_add", {"m": 33, "n": 40, "k": 24, "layout_c": "transposed", "beta": 0.25}),
    ("matmul_add", {"m": 33, "n": 40, "k": 24}),
    ("linear_silu_mul", {"m": 5, "batch": 3, "n": 40, "k": 24}),
    ("linear_silu_mul", {"m": 33, "n": 40, "k": 24, "layout": "padded", "layout_b": "transposed"}),
]  # fmt: skip


def gradients(call, args, dtype, names):
    """Of the named arguments, of a random weighting of the output."""
    given = [a.detach().to(dtype) if isinstance(a, Tensor) else a for a in args]
    for i in names:
        given[i].requires_grad_()
    out = call(*given)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out)
    return torch.autograd.grad((out * weights).sum(), [given[i] for i in names])


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(("name", "params"), CASES)
def test_gradients_are_those_of_float64(name, params, dtype):
    op = REGISTRY[name]
    args = op.complete((), op.inputs(**params, dtype=dtype, device="cpu", seed=4))
    tensors = [i for i, a in enumerate(args) if isinstance(a, Tensor)]
    found = gradients(op, args, args[0].dtype, tensors)
    wanted = gradients(op.reference, args, torch.float64, tensors)
    for i, ours, theirs in zip(tensors, found, wanted, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == args[i].dtype
        assert (ours.double() - theirs).norm() <= 4 * ALLOWED[ours.dtype] * theirs.norm(), op.names[i]


@pytest.mark.parametrize("shape", [(24,), (0, 24), (2, 0, 24), (2, 3, 24)], ids=str)
def test_x_may_have_any_number_of_dimensions(shape):
    x, weight = torch.randn(shape, requires_grad=True), torch.randn(20, 24, requires_grad=True)
    tilery.linear_silu_mul(x, weight).sum().backward()
    found, x.grad, weight.grad = (x.grad, weight.grad), None, None
    REGISTRY["linear_silu_mul"].reference(x, weight).sum().backward()
    torch.testing.assert_close(found, (x.grad, weight.grad), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("m", "n", "k"), [(0, 4, 3), (4, 0, 3), (4, 3, 0)])
def test_gradients_of_empty_products_are_zeros(m, n, k):
    a, b = torch.randn(m, k, requires_grad=True), torch.randn(k, n, requires_grad=True)
    tilery.matmul(a, b).sum().backward()
    assert a.grad.shape == a.shape and b.grad.shape == b.shape and not a.grad.any() and not b.grad.any()


@pytest.mark.parametrize("name", ["matmul", "bmm", "matmul_add", "linear_silu_mul"])
def test_no_gradient_is_computed_that_nobody_asked_for(name, monkeypatch):
    op = REGISTRY[name]
    args = op.complete((), op.inputs(**next(p for n, p in CASES if n == name), dtype="fp32", device="cpu", seed=4))
    made, call = [], Op.__call__
    monkeypatch.setattr(Op, "__call__", lambda self, *a, **k: made.append(self.name) or call(self, *a, **k))
    counts = []
    for names in ([0], [1], [0, 1]):
        made.clear()
        gradients(op, args, torch.float32, names)
        counts.append(len(made))
    assert counts[0] == counts[1] == counts[2] - 1
