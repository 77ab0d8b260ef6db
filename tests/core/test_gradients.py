"""Backwards are right: through the references in float64 by finite differences, and through the kernels by autograd."""

import pytest
import torch
from torch import Tensor

from cases import plain_case
from tilery.core import library
from tilery.core import plan as plan_module
from tilery.core.cases import call_for
from tilery.core.op import REGISTRY, Op

GRADED = [pytest.param(op, id=op.name) for op in REGISTRY.values() if op.backward is not None]


def function(op):
    """The op's references as an autograd function: forward by the reference, backward by the op's own."""

    class Reference(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *args):
            made = op.reference(*args)
            library._save(ctx, args, made)
            return made

        @staticmethod
        def backward(ctx, *grads):
            return library._backward(op)(ctx, *grads)

    call_for(op, plain_case(op, "fp32"), "cpu")  # from then on the names of outputs are known
    return Reference.apply


def small(op, dtype):
    """A few rows and columns of the first plain case: finite differences take a pass per element."""
    params = plain_case(op, "fp32").params
    params = params | {name: min(value, 6) for name, value in params.items() if name in ("m", "n", "k")}
    args = op.complete((), op.inputs(**params, device="cpu", seed=3))
    return tuple(a.to(dtype) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)


@pytest.mark.parametrize("op", GRADED)
def test_gradcheck_in_float64_through_the_references(op, monkeypatch):
    monkeypatch.setattr(Op, "__call__", lambda self, *args, **kwargs: self.reference(*self.complete(args, kwargs)))
    args = tuple(
        a.requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in small(op, torch.float64)
    )
    assert torch.autograd.gradcheck(function(op), args, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("op", GRADED)
def test_gradients_through_the_kernels_are_those_of_the_references(op):
    args = op.complete((), op.inputs(**plain_case(op, "fp32").params, device="cpu", seed=4))

    def gradients(call, dtype):
        given = [
            a.detach().to(dtype).requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a
            for a in args
        ]
        outs = plan_module.packed(call(*given))
        g = torch.Generator().manual_seed(5)
        loss = sum((out * torch.randn(out.shape, generator=g)).sum() for out in outs if out.requires_grad)
        loss.backward()
        return [a.grad for a in given if isinstance(a, Tensor)]

    found, expected = gradients(op, torch.float32), gradients(op.reference, torch.float64)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
