"""What decides a plan and what it may write to: devices, backends that refuse, outputs that overlap, autograd."""

import pytest
import torch

import tilery
from tilery.base.errors import BadInput, NoBackend
from tilery.core import plan as plan_module
from tilery.ops import rms_norm, softmax

X, W = torch.randn(4, 8), torch.randn(8)


def test_tensors_of_another_device_have_another_key():
    here, nowhere = (rms_norm._key((X.to(where), W.to(where), 1e-6, 0.0), None, None) for where in ("cpu", "meta"))
    assert None not in (here, nowhere) and here != nowhere


def test_a_backend_that_is_named_and_refuses_is_not_run(monkeypatch):
    kernel = softmax.kernel("numba")
    monkeypatch.setattr(kernel, "refusal", lambda x, config=None: "not on Sundays")
    monkeypatch.setattr(kernel, "run", lambda *_: pytest.fail("it ran"))
    with pytest.raises(NoBackend, match="numba: not on Sundays"):
        softmax.plan(softmax.specs((X,)), "numba")


@pytest.mark.parametrize("shift", [-4, 4, 28])
def test_out_may_not_overlap_an_argument_in_part(shift):
    storage = torch.randn(96)
    x, out = (storage[start : start + 32].view(4, 8) for start in (32, 32 + shift))
    with pytest.raises(BadInput, match=r"out\[0\] must not share memory with another argument"):
        softmax(x, out=out)


def test_out_may_lie_right_beside_an_argument():
    storage = torch.randn(96)
    x, out = storage[32:64].view(4, 8), storage[64:].view(4, 8)
    assert softmax(x, out=out) is out and torch.allclose(out, torch.softmax(x, -1))


def test_a_tensor_on_the_first_device_runs_there_while_the_second_is_current(monkeypatch):
    current, log = [1], []

    class Guard:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            self.before, current[0] = current[0], self.index

        def __exit__(self, *_):
            current[0] = self.before

    monkeypatch.setattr(torch.cuda, "device", Guard)
    monkeypatch.setattr(plan_module, "_current_device", lambda: current[0])
    plan_module.Plan("t", "t", None, "default", torch.device("cuda", 0), (), (), lambda *_: log.append(current[0]))(())
    assert log == [0] and current == [1]


def test_autograd_sees_what_an_op_writes_in_place():
    """A backward that saved the tensor before must not use what it holds now."""
    q, k = torch.randn(1, 3, 2, 8), torch.randn(1, 3, 1, 8)
    cos, sin, g = torch.rand(3, 4), torch.rand(3, 4), torch.randn(1, 3, 2, 8, requires_grad=True)
    saved = (g * q).sum()
    tilery.rope_(q, k, cos, sin)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()
