"""Calls that compute nothing are held to the same rules, and gradients are taken as autograd hands them out."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tilery
from tilery.base.errors import BadInput


def meta(*tensors):
    return (t.to("meta") for t in tensors)


def fake(*tensors):
    mode = FakeTensorMode()
    return (mode.from_tensor(t) for t in tensors)


@pytest.mark.parametrize("made", [meta, fake])
def test_a_fake_call_is_refused_as_a_real_one_is(made):
    """A graph is traced with fake tensors: what is wrong must be said then, not when it runs."""
    x, w = made(torch.randn(4, 8), torch.randn(7))
    with pytest.raises(BadInput, match=r"weight must be \[8\] as x's rows are, got \[7\]"):
        torch.ops.tilery.rms_norm(x, w)


def test_a_backward_takes_the_expanded_gradient_of_a_sum():
    """`.sum()` hands out one value for all elements, with strides of 0, which no op takes."""
    x = torch.randn(4, 8, requires_grad=True)
    (tilery.softmax(x).sum() + tilery.log_softmax(x).sum()).backward()
    wanted = x.detach().clone().requires_grad_()
    (torch.softmax(wanted, -1).sum() + torch.log_softmax(wanted, -1).sum()).backward()
    assert torch.allclose(x.grad, wanted.grad, atol=1e-5)
