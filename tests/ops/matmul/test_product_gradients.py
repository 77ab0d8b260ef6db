"""Gradients of products: every dtype, layout and activation against float64, and no more work than is asked for."""

import pytest
import torch
from torch import Tensor

import tilery
from cases import home
from tilery.core.op import REGISTRY, Op
from tilery.measure.place import place
from tilery.ops.matmul.contract import ACTIVATIONS, ALLOWED, ALLOWED_TF32

SIZES = {"m": 33, "n": 40, "k": 24}
MATRICES = [(a, b) for a in ("contiguous", "transposed") for b in ("contiguous", "transposed")]
ROWS = [(x, w) for x in ("contiguous", "padded", "misaligned") for w in ("contiguous", "transposed", "misaligned")]
CASES = [
    *(("matmul", {**SIZES, "layout": a, "layout_b": b}) for a, b in MATRICES),
    *(("bmm", {"batch": 3, "m": 9, "n": 40, "k": 24, "layout": a, "layout_b": b}) for a, b in MATRICES),
    ("matmul_add", {**SIZES, "alpha": 0.5, "beta": -2.0}),
    ("matmul_add", {**SIZES, "layout_c": "transposed", "beta": 0.25}),
    ("matmul_add", {**SIZES}),
    ("linear_silu_mul", {"m": 5, "batch": 3, "n": 40, "k": 24}),
    ("linear_silu_mul", {**SIZES, "layout": "padded", "layout_b": "transposed"}),
    *(("linear", {**SIZES, "bias": True, "residual": True, "activation": act}) for act in ACTIVATIONS),
    *(("linear", {**SIZES, "activation": act}) for act in ACTIVATIONS),
    *(("linear", {**SIZES, "layout": x, "layout_b": w, "bias": True, "residual": True}) for x, w in ROWS),
    ("linear", {"m": 5, "batch": 3, "n": 40, "k": 24, "bias": True, "residual": True, "activation": "gelu"}),
    *(("grouped_matmul", {**SIZES, "experts": 3, "layout": a, "layout_b": b}) for a, b in MATRICES),
    ("grouped_matmul", {**SIZES, "experts": 3, "layout": "padded", "layout_b": "misaligned"}),
    ("grouped_matmul", {**SIZES, "experts": 6, "sizes": "0+7+0+1+20+0"}),  # the last five rows are in no group
]  # fmt: skip
ASKED = list(dict.fromkeys(name for name, _ in CASES))
# Whose kernels run in the backward: one language's, or, on a GPU, those that dispatch takes.
BACKENDS = ["numba", "triton", pytest.param(None, marks=pytest.mark.gpu)]


def floats(args):
    """Places of the arguments that may have a gradient."""
    return [i for i, a in enumerate(args) if isinstance(a, Tensor) and a.is_floating_point()]


def gradients(call, args, dtype, names):
    """Of the named arguments, of a random weighting of the output."""
    given = [a.detach().to(dtype) if i in floats(args) else a for i, a in enumerate(args)]
    for i in names:
        given[i].requires_grad_()
    out = call(*given)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out)
    return torch.autograd.grad((out * weights).sum(), [given[i] for i in names])


def drawn(op, **params):
    return op.complete((), op.inputs(**params))


@pytest.fixture
def backward_by(monkeypatch):
    """Has the ops that a backward calls run by one kernel, and says on which device."""

    def choose(kernel, op, dtype):
        if kernel is None:
            return torch.device("cuda:0")
        where = place(op, kernel)
        if where.device is None or (where.interpreted and dtype == "bf16"):
            pytest.skip(where.reason)
        call = Op.__call__

        def chosen(self, *args, **kwargs):
            return call(self, *args, **kwargs, **({} if torch.is_grad_enabled() else {"backend": kernel}))

        monkeypatch.setattr(Op, "__call__", chosen)
        return home(kernel)

    return choose


def assert_gradients_are_right(op, args, dtype, allowed):
    places = floats(args)
    found, wanted = gradients(op, args, dtype, places), gradients(op.reference, args, torch.float64, places)
    for i, ours, theirs in zip(places, found, wanted, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == dtype
        assert (ours.double() - theirs).norm() <= allowed * theirs.norm(), op.names[i]


@pytest.mark.parametrize("kernel", BACKENDS)
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(("name", "params"), CASES)
def test_gradients_are_those_of_float64(name, params, dtype, kernel, backward_by):
    op = REGISTRY[name]
    args = drawn(op, **params, dtype=dtype, device=backward_by(kernel, op, dtype), seed=4)
    assert_gradients_are_right(op, args, args[0].dtype, 4 * ALLOWED[args[0].dtype])


@pytest.mark.parametrize("kernel", BACKENDS)
@pytest.mark.parametrize("name", ["matmul", "matmul_add", "linear", "linear_silu_mul"])
def test_gradients_of_tf32_are_products_in_tf32(name, kernel, backward_by, monkeypatch):
    op, more = REGISTRY[name], {"bias": True, "activation": "silu"} if name == "linear" else {}
    args = drawn(op, **SIZES, **more, dtype="fp32", precision="tf32", device=backward_by(kernel, op, "fp32"), seed=4)
    seen, call = [], Op.__call__

    def watched(self, *given, **kwargs):
        bound = dict(zip(self.names, self.complete(given, {k: v for k, v in kwargs.items() if k != "backend"})))
        if "precision" in bound and bound[self.names[0]].shape[0] > 1:  # a bias's gradient is a product of one row
            seen.append(bound["precision"])
        return call(self, *given, **kwargs)

    monkeypatch.setattr(Op, "__call__", watched)
    assert_gradients_are_right(op, args, torch.float32, 4 * ALLOWED_TF32[torch.float32])
    assert len(seen) >= 3 and set(seen) == {"tf32"}


@pytest.mark.parametrize("name", ["linear", "linear_silu_mul"])
@pytest.mark.parametrize("shape", [(24,), (0, 24), (2, 0, 24), (2, 3, 24)], ids=str)
def test_x_may_have_any_number_of_dimensions(shape, name):
    op, more = REGISTRY[name], {"bias": torch.randn(20), "activation": "gelu_tanh"} if name == "linear" else {}
    x, weight = torch.randn(shape, requires_grad=True), torch.randn(20, 24, requires_grad=True)
    op(x, weight, **more).sum().backward()
    found, x.grad, weight.grad = (x.grad, weight.grad), None, None
    op.reference(x, weight, **more).sum().backward()
    torch.testing.assert_close(found, (x.grad, weight.grad), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("m", "n", "k"), [(0, 4, 3), (4, 0, 3), (4, 3, 0)])
def test_gradients_of_empty_products_are_zeros(m, n, k):
    a, b = torch.randn(m, k, requires_grad=True), torch.randn(k, n, requires_grad=True)
    tilery.matmul(a, b).sum().backward()
    assert a.grad.shape == a.shape and b.grad.shape == b.shape and not a.grad.any() and not b.grad.any()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("m", "n", "k"), [(0, 4, 3), (4, 0, 3), (4, 3, 0)])
def test_gradients_of_an_empty_linear(m, n, k, activation):
    """Without columns of x the bias and the residual are all there is."""
    op = REGISTRY["linear"]
    given = [torch.randn(shape, requires_grad=True) for shape in ((m, k), (n, k), (n,), (m, n))]
    found = torch.autograd.grad(op(*given, activation).sum(), given)
    wanted = torch.autograd.grad(op.reference(*given, activation).sum(), given)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("m", "n", "k", "experts"), [(0, 4, 3, 2), (4, 0, 3, 2), (4, 3, 0, 2), (4, 3, 2, 0)])
def test_gradients_of_empty_groups_are_zeros(m, n, k, experts):
    a, b, offsets = drawn(REGISTRY["grouped_matmul"], m=m, n=n, k=k, experts=experts, dtype="fp32", device="cpu")
    a.requires_grad_(), b.requires_grad_()
    tilery.grouped_matmul(a, b, offsets).sum().backward()
    assert a.grad.shape == a.shape and b.grad.shape == b.shape and not a.grad.any() and not b.grad.any()


def test_gradients_of_groups_whose_ends_lie_are_nan():
    a, b = torch.randn(8, 4, requires_grad=True), torch.randn(2, 4, 3, requires_grad=True)
    tilery.grouped_matmul(a, b, torch.tensor([5, 9], dtype=torch.int32)).sum().backward()
    assert a.grad.isnan().all() and b.grad.isnan().all()


def test_what_relu_cut_off_takes_no_gradient_even_an_infinite_one():
    z = torch.tensor([[-1.0, 0.0, 2.0, float("nan")]])
    dy = torch.tensor([[float("inf"), float("nan"), float("inf"), 3.0]])
    for kernel in ("numba", "triton"):
        where = place(REGISTRY["activation_backward"], kernel)
        if where.device is not None:
            dz = tilery.activation_backward(dy.to(where.device), z.to(where.device), "relu", backend=kernel)
            assert dz.tolist() == [[0.0, 0.0, float("inf"), 3.0]]  # as torch has it


@pytest.mark.parametrize("name", ASKED)
def test_no_gradient_is_computed_that_nobody_asked_for(name, monkeypatch):
    op = REGISTRY[name]
    args = drawn(op, **next(p for n, p in CASES if n == name), dtype="fp32", device="cpu", seed=4)
    made, call = [], Op.__call__
    monkeypatch.setattr(Op, "__call__", lambda self, *a, **k: made.append(self.name) or call(self, *a, **k))
    counts = []
    for names in ([0], [1], [0, 1]):
        made.clear()
        gradients(op, args, torch.float32, names)
        counts.append(len(made))
    assert counts[0] == counts[1] == counts[2] - 1


@pytest.mark.parametrize(
    ("activation", "asked", "ops"),
    [
        ("gelu", [3], []),  # a residual's is what came
        ("none", [2], ["matmul"]),
        ("gelu", [2], ["linear", "activation_backward", "matmul"]),
        ("gelu", [0, 3], ["linear", "activation_backward", "matmul"]),
    ],
)
def test_linear_computes_again_what_an_activation_was_given_and_no_more(activation, asked, ops, monkeypatch):
    op, made, call = REGISTRY["linear"], [], Op.__call__
    args = drawn(op, **SIZES, bias=True, residual=True, activation=activation, dtype="fp32", device="cpu")
    monkeypatch.setattr(Op, "__call__", lambda self, *a, **k: made.append(self.name) or call(self, *a, **k))
    gradients(op, args, torch.float32, asked)
    assert made == ["linear", *ops]  # the first is the forward
