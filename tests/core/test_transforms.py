"""Who else may watch a call: tracers, modes, transforms, forward-mode AD; of warm ops too, whose path is short."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import tilery
from cases import plain_case
from tilery.base.errors import BadInput, NoBackward
from tilery.core import plan as plan_module
from tilery.core.op import REGISTRY

OPS = pytest.mark.parametrize("op", list(REGISTRY.values()), ids=lambda op: op.name)
GRADED = [op for op in REGISTRY.values() if op.backward is not None]


def warm(op):
    """Arguments for which the op holds a plan at the front of its recent ones."""
    args = op.complete((), op.inputs(**plain_case(op).params, device="cpu", seed=1))
    for _ in range(2):
        op(*(a.clone() if isinstance(a, Tensor) else a for a in args))
    return args


@OPS
def test_a_warm_op_is_a_node_of_the_graph_that_make_fx_traces(op):
    """A constant in its place would give the same answer whatever the input."""
    args = warm(op)
    places = [i for i, a in enumerate(args) if isinstance(a, Tensor)]

    def call(*tensors):
        given = list(args)
        for i, t in zip(places, tensors):
            given[i] = t
        return op(*given)

    graph = make_fx(call)(*(args[i].clone() for i in places)).graph
    assert any(node.target is op.torch_op.default for node in graph.nodes)


def test_a_traced_function_follows_its_input():
    x, w = torch.randn(4, 8), torch.randn(8)
    tilery.rms_norm(x, w)
    traced = make_fx(lambda a: tilery.rms_norm(a, w))(x)
    other = torch.randn(4, 8)
    assert torch.equal(traced(other), tilery.rms_norm(other, w))


def test_a_warm_op_under_a_fake_mode_computes_nothing():
    x, w = torch.randn(4, 8), torch.randn(8)
    tilery.rms_norm(x, w)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(tilery.rms_norm(x, w), FakeTensor)


def test_a_mode_sees_a_warm_op():
    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen, x = [], torch.randn(4, 8)
    tilery.softmax(x)
    with Log():
        tilery.softmax(x)
    assert torch.ops.tilery.softmax.default in seen


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_torch_jit_trace_records_the_op():
    x, w = torch.randn(4, 8), torch.randn(8)
    tilery.rms_norm(x, w)
    traced = torch.jit.trace(lambda a: tilery.rms_norm(a, w), (x,))
    assert "tilery::rms_norm" in str(traced.graph)
    other = torch.randn(4, 8)
    assert torch.equal(traced(other), tilery.rms_norm(other, w))


@OPS
@pytest.mark.parametrize("direct", [True, False], ids=["direct", "torch.ops"])
def test_forward_mode_is_refused_by_name(op, direct):
    """Without a word the tangent would be lost, and read as zero."""
    args = warm(op)
    i = next((i for i, a in enumerate(args) if isinstance(a, Tensor) and a.dtype == torch.float32), None)
    if i is None:
        pytest.skip("takes integers alone")
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(args[i].clone(), torch.ones_like(args[i]))
        with pytest.raises(NoBackward, match=rf"no forward-mode derivative and {op.names[i]} carries a tangent"):
            (op if direct else op.torch_op)(*args[:i], dual, *args[i + 1 :])


def test_forward_mode_around_tensors_without_a_tangent_is_an_ordinary_call():
    x = torch.randn(4, 8)
    with forward_ad.dual_level():
        assert torch.allclose(tilery.softmax(x), torch.softmax(x, -1), atol=1e-6)


@pytest.mark.parametrize("call", [tilery.softmax, torch.ops.tilery.softmax], ids=["direct", "torch.ops"])
def test_transforms_that_differentiate_are_refused_by_name(call):
    x = torch.randn(4, 8)
    with pytest.raises(NoBackward, match="no forward-mode derivative and x carries a tangent"):
        torch.func.jvp(call, (x,), (torch.ones_like(x),))
    with pytest.raises(NoBackward, match=r"is not differentiated by torch\.func"):
        torch.func.grad(lambda a: call(a).sum())(x)


@pytest.mark.parametrize("op", GRADED, ids=lambda op: op.name)
def test_a_gradient_of_no_rows(op):
    """`.sum()` hands out an expanded gradient, and `.contiguous()` of an empty one keeps the stride of 0."""
    params = plain_case(op).params
    args = op.complete((), op.inputs(**params | {"m": 0}, device="cpu", seed=1))
    given = [a.requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
    outs = plan_module.packed(op(*given))
    sum(out.sum() for out in outs if out.requires_grad).backward()
    for a in given:
        if isinstance(a, Tensor) and a.grad is not None:
            assert a.grad.shape == a.shape and not a.grad.any()


@pytest.mark.parametrize("shape", [(3, 0, 8), (0, 8), (3, 0)])
def test_an_expanded_empty_tensor_is_an_empty_one(shape):
    empty = torch.empty(1).expand(shape)
    assert 0 in empty.stride() and tilery.softmax(empty).shape == shape


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 2**200])
def test_integers_past_64_bits_are_refused_by_name(value):
    q = torch.randn(1, 4, 2, 16)
    with pytest.raises(BadInput, match="window must be an integer of 64 bits, got"):
        tilery.attention(q, q, q, window=value)
    logits, targets = torch.randn(4, 8), torch.zeros(4, dtype=torch.int64)
    for _ in range(2):  # a runtime scalar: the second call would take the plan of the first
        tilery.cross_entropy(logits, targets)
        with pytest.raises(BadInput, match="ignore_index must be an integer of 64 bits, got"):
            tilery.cross_entropy(logits, targets, ignore_index=value)
