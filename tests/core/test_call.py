"""The arguments of one call, by name."""

import copy

import pytest
import torch

from tilery.base.launch import Argument, Scalar
from tilery.base.spec import TensorSpec
from tilery.core.call import Call
from tilery.core.cases import call_for, specs_for
from tilery.core.op import REGISTRY
from tilery.ops import rms_norm, softmax


def test_what_a_call_has_are_its_attributes():
    call = Call({"x": 1, "eps": 2.0})
    assert (call.x, call.eps) == (1, 2.0) and repr(call) == "Call(x=1, eps=2.0)"
    with pytest.raises(AttributeError, match="a call of this op has x, eps, not 'y'"):
        _ = call.y


def test_tensors_are_found_in_their_order_as_specs_or_data():
    spec, data = TensorSpec.contiguous((2,), torch.float32, "cpu"), torch.ones(3)
    assert Call({"eps": 1.0, "x": spec, "w": None, "y": data}).tensors() == [spec, data]


@pytest.mark.parametrize("op", REGISTRY.values(), ids=lambda op: op.name)
def test_no_argument_or_output_of_an_op_is_hidden_by_a_method(op):
    """`values` would not be an argument if a call had a method of that name."""
    case = op.cases["test"][0]
    call = call_for(op, case, "cpu")
    for name, spec in zip(op.signature.decisive, specs_for(op, case, "cpu"), strict=True):
        assert getattr(call, name) == spec, name
    assert all(isinstance(getattr(call, name), Argument) for name in op.output_names)


def test_a_longer_call_is_another_of_the_same_class():
    class Rows(Call):
        @property
        def twice(self):
            return 2 * self.x

    short = Rows({"x": 1})
    long = short.extended({"y": 5})
    assert isinstance(long, Rows) and (long.twice, long.y) == (2, 5) and not hasattr(short, "y")
    with pytest.raises(AssertionError, match="must not be called like an argument: x"):
        long.extended({"x": 7})


def test_a_copy_asks_for_nothing_before_it_is_made():
    """copy and pickle look for attributes of an object that has no values yet."""
    assert copy.copy(Call({"x": 1})).x == 1


def test_a_planned_call_refers_to_arguments_scalars_and_outputs():
    specs = rms_norm.specs((torch.randn(4, 8), torch.randn(8), 1e-6, 0.0))
    call = rms_norm.call(specs)
    assert [spec.slot for spec in (call.x, call.weight)] == [0, 1] and call.x == specs[0]
    assert isinstance(call.eps, Scalar) and (call.eps.slot, call.eps.kind) == (2, float)
    (name,) = rms_norm.output_names
    out = getattr(call, name)
    assert isinstance(out, Argument) and out.slot == len(rms_norm.names) and out.shape == (4, 8)
    assert rms_norm.specs_in(call) == specs and rms_norm.device(call) == torch.device("cpu")
    assert rms_norm.output_specs(call) == (TensorSpec.contiguous((4, 8), torch.float32, "cpu"),)


def test_a_running_call_has_the_data():
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    softmax.call(softmax.specs((x,)))  # from then on the names of outputs are known
    call = softmax.given((x,), (y,))
    assert call.x is x and call.y is y
    assert not hasattr(softmax.given((x,)), "y")
