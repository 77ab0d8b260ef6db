"""torch.library: every op is torch.ops.tilery.<op>, sound under opcheck, compile, export, fake tensors and autocast."""

from typing import ClassVar

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

import plant
import tilery.ops
from cases import plain_case
from tilery.base.errors import BadInput, require
from tilery.base.spec import Bucket, Cost, TensorSpec, case
from tilery.core import plan as plan_module
from tilery.core.op import REGISTRY, Op
from tilery.measure.check import check

OPS = pytest.mark.parametrize("op", list(REGISTRY.values()), ids=lambda op: op.name)


def arguments(op):
    return op.complete((), op.inputs(**plain_case(op).params, device="cpu", seed=1))


def copies(args):
    return [a.clone() if isinstance(a, Tensor) else a for a in args]


def results(call, args):
    """What it returns and what it leaves in its arguments, all as one flat list of tensors."""
    given = copies(args)
    made = call(*given)
    return [*(plan_module.packed(made) if made is not None else ()), *(a for a in given if isinstance(a, Tensor))]


def same(found, expected):
    return len(found) == len(expected) and all(
        torch.equal(a.float(), b.float()) or torch.allclose(a.float(), b.float(), equal_nan=True)
        for a, b in zip(found, expected)
    )


@OPS
def test_opcheck(op):
    args = arguments(op)
    tests = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if not any(isinstance(a, Tensor) and a.is_floating_point() and a.itemsize == 1 for a in args):
        tests.append("test_schema")  # compares arguments with allclose, which torch does not have for fp8
    torch.library.opcheck(op.torch_op.default, args, test_utils=tests)


@OPS
def test_compiles_without_a_graph_break(op):
    torch._dynamo.reset()  # after eight ops it would take the function for one that changes too often
    args = arguments(op)
    compiled = torch.compile(lambda *a: op(*a), fullgraph=True, backend="aot_eager")
    assert same(results(compiled, args), results(op, args))


@OPS
def test_exports(op):
    class Module(torch.nn.Module):
        def forward(self, *args):
            return op(*args)

    args = arguments(op)
    exported = torch.export.export(Module(), tuple(copies(args)))
    assert any(node.target is op.torch_op.default for node in exported.graph.nodes)
    assert same(results(exported.module(), args), results(op, args))


@OPS
def test_fake_tensors_plan_nothing(op):
    op.plans.clear()
    with FakeTensorMode() as mode:
        args = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments(op)]
        made = op(*args)
    assert not len(op.plans)
    real = op(*arguments(op))
    assert [t.shape for t in plan_module.packed(made) if t is not None] == [
        t.shape for t in plan_module.packed(real) if t is not None
    ]


def test_meta_tensors_through_torch_ops_give_meta_tensors():
    x, w = torch.empty(4, 8, device="meta"), torch.empty(8, device="meta")
    assert torch.ops.tilery.rms_norm(x, w).is_meta


def test_dynamic_shapes_compile_once():
    counted = CompileCounter()
    compiled = torch.compile(lambda x: tilery.softmax(x), fullgraph=True, backend=counted, dynamic=True)
    for m in (3, 5, 9):
        x = torch.randn(m, 16)
        assert torch.allclose(compiled(x), torch.softmax(x, -1), atol=1e-6)
    assert counted.frame_count == 1


@pytest.mark.parametrize("call", [tilery.rms_norm, torch.ops.tilery.rms_norm], ids=["direct", "torch.ops"])
def test_autocast_sees_the_dtype_it_is_given(call):
    x, w = torch.randn(4, 8), torch.randn(8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert call(x, w).dtype == torch.float32
        assert call(x.bfloat16(), w.bfloat16()).dtype == torch.bfloat16


def test_choices_are_not_part_of_the_schema():
    names = [argument.name for argument in torch.ops.tilery.rms_norm.default._schema.arguments]
    assert names == ["x", "weight", "eps", "offset"]
    with FakeTensorMode() as mode:
        x = mode.from_tensor(torch.ones(2, 2))
        with pytest.raises(BadInput, match="backend=, config= and out= are for plain tensors"):
            tilery.softmax(x, backend="numba")


def test_subclasses_go_through_the_dispatcher():
    class Logged(Tensor):
        seen: ClassVar[list[str]] = []

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            cls.seen.append(str(func))
            return super().__torch_function__(func, types, args, kwargs or {})

    x = torch.randn(2, 8).as_subclass(Logged)
    assert torch.allclose(tilery.softmax(x).as_subclass(Tensor), torch.softmax(torch.Tensor(x), -1), atol=1e-6)
    assert any("tilery.softmax" in name for name in Logged.seen)


def test_vmap_sees_every_row():
    """A transform hands out tensors of plain type: the direct path would read only the first."""
    x = torch.randn(3, 4, 8)
    assert torch.allclose(torch.vmap(lambda t: tilery.softmax(t))(x), torch.softmax(x, -1), atol=1e-6)


# Ops made here, to show single rules: a backward that is an op of its own, a scalar that decides, one in place.


@pytest.fixture
def toy(monkeypatch):
    """Makes an op whose kernel is torch's: `run` of its arguments and outputs, by the names of its own parameters."""

    def make(reference, run, **more):
        name, arguments = reference.__name__, run.__code__.co_varnames[: run.__code__.co_argcount]
        contract = {
            "check": lambda call: None, "outputs": lambda call: {"y": TensorSpec(*call.x)},
            "cost": lambda call: Cost(1, 1, 1), "bucket": lambda call: Bucket("", {}),
            "inputs": lambda m, device, seed: {"x": torch.randn(m)}, "cases": {"test": [case(m=3)], "bench": []},
            "allowed": {torch.float32: 1e-6}, "baselines": {},
            "kernels": {"numba": plant.place_of(monkeypatch, name, plant.ByTorch(run, *arguments))},
        }  # fmt: skip
        made = Op(reference, **contract | more)
        REGISTRY.pop(name)
        return made

    return make


def test_a_backward_is_an_op_of_its_own(toy):
    def toy_square_backward(x: Tensor, dy: Tensor) -> Tensor:
        return 2 * x * dy

    def toy_square(x: Tensor) -> Tensor:
        return x * x

    backward = toy(toy_square_backward, lambda x, dy, y: torch.mul(2 * x, dy, out=y))
    square = toy(
        toy_square, lambda x, y: torch.mul(x, x, out=y), backward=lambda call, grads: {"x": backward(call.x, grads.y)}
    )
    x = torch.randn(5, requires_grad=True)
    for call in (square, torch.ops.tilery.toy_square):
        x.grad = None
        call(x).sum().backward()
        assert torch.allclose(x.grad, 2 * x.detach())
    with pytest.raises(BadInput, match="for plain tensors without gradients"):
        square(x, backend="numba")
    torch.library.opcheck(square.torch_op.default, (torch.randn(5, requires_grad=True),))


def test_a_gradient_of_what_is_no_argument_is_a_mistake_in_the_contract(toy):
    def toy_negate(x: Tensor) -> Tensor:
        return -x

    negate = toy(toy_negate, lambda x, y: torch.neg(x, out=y), backward=lambda call, grads: {"z": -grads.y})
    with pytest.raises(AssertionError, match="toy_negate: gradients of z, which it does not have"):
        negate(torch.randn(5, requires_grad=True)).sum().backward()


def test_gradients_are_given_by_name(toy):
    def toy_times(x: Tensor, w: Tensor) -> Tensor:
        return x * w

    times = toy(
        toy_times, lambda x, w, y: torch.mul(x, w, out=y),
        backward=lambda call, grads: {"w": grads.y * call.x, "x": grads.y * call.w},
    )  # fmt: skip
    x, w = (torch.randn(5, requires_grad=True) for _ in range(2))
    times(x, w).sum().backward()
    assert torch.equal(x.grad, w.detach()) and torch.equal(w.grad, x.detach())


def test_a_backward_sees_arguments_outputs_and_gradients_by_name(toy):
    def toy_exp(x: Tensor, w: Tensor | None, by: float = 1.0) -> Tensor:
        return x.exp() * by

    def backward(call, grads):
        seen.append((call.w, call.by))
        return {"x": grads.y * call.y}  # nothing for w and by

    seen = []
    exp = toy(toy_exp, lambda x, by, y: y.copy_(x.exp() * by), backward=backward, runtime=("by",))
    x = torch.randn(5, requires_grad=True)
    exp(x, None, 3.0).sum().backward()
    assert torch.allclose(x.grad, 3 * x.detach().exp()) and seen == [(None, 3.0)]


def test_a_scalar_that_decides_is_part_of_the_key(toy):
    def toy_scale(x: Tensor, twice: bool = False) -> Tensor:
        return x * (2 if twice else 1)

    scale = toy(toy_scale, lambda x, twice, y: torch.mul(x, 1 + twice, out=y))
    x = torch.randn(5)
    for _ in range(2):  # by the key, then by the recent plan
        assert torch.equal(scale(x, True), 2 * x) and torch.equal(scale(x, False), x) and torch.equal(scale(x), x)
    assert len(scale.plans) == 2


def test_an_op_in_place_says_what_it_mutates(toy):
    def toy_double_(x: Tensor) -> None:
        x.mul_(2)

    double = toy(toy_double_, lambda x: x.mul_(2), mutates=("x",), outputs=lambda call: {})
    x = torch.ones(3)
    version = x._version
    assert double(x) is None and torch.equal(x, torch.full((3,), 2.0)) and x._version > version
    assert "Tensor(a0!) x" in str(double.torch_op.default._schema)
    assert check(double, "numba", case(m=3), "cpu").errors == (0.0,)


def test_runtime_scalars_are_checked_by_name_at_every_call(toy):
    def toy_drop(x: Tensor, seed: int = 0, p: float = 0.5) -> Tensor:
        return x * p

    def check_runtime(p, seed):
        require(0 <= p <= 1, f"p must be a probability, got {p}")
        require(seed >= 0, f"seed must not be negative, got {seed}")

    drop = toy(
        toy_drop, lambda x, p, y: torch.mul(x, p, out=y), runtime=("seed", "p"), check_runtime=check_runtime
    )  # fmt: skip
    x = torch.ones(5)
    for _ in range(2):
        assert torch.equal(drop(x, p=0.25), 0.25 * x)
        with pytest.raises(BadInput, match="toy_drop: p must be a probability, got 2"):
            drop(x, p=2)
        with pytest.raises(BadInput, match="toy_drop: seed must not be negative, got -1"):
            drop(x, -1)
    assert len(drop.plans) == 1
