"""A call of an op: bad input, gradients, outputs, scalars, and what an op is to Python."""

import copy
import pickle

import numpy as np
import pytest
import torch

import tilery
from tilery.base.errors import BadInput, NoBackward
from tilery.base.spec import TensorSpec
from tilery.core.op import REGISTRY
from tilery.ops import linear, matmul, rms_norm, rms_norm_fp8, silu_mul, softmax

X, W = torch.randn(4, 8), torch.randn(8)
A, B = torch.randn(4, 8), torch.randn(8, 6)


def reference(x, w, eps=1e-6):
    return rms_norm.reference(x.double(), w.double(), eps).to(x.dtype)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rms_norm([1.0], W), "rms_norm: x must be Tensor, got list"),
        (lambda: rms_norm(X, None), "rms_norm: weight must be Tensor, got NoneType"),
        (lambda: rms_norm(np.ones((4, 8)), W), "rms_norm: x must be Tensor, got ndarray"),
        (lambda: rms_norm(X, W, "1e-6"), "rms_norm: eps must be float or int, got str"),
        (lambda: rms_norm(X, W, torch.tensor(1e-6)), "rms_norm: eps must be float or int, got Tensor"),
        (lambda: rms_norm(X), "missing a required argument: 'weight'; it takes"),
        (lambda: rms_norm(X, W, epsilon=1), "unexpected keyword argument 'epsilon'"),
        (lambda: rms_norm(X, W, 1e-6, 0.0, 3), "too many positional arguments"),
        (lambda: rms_norm(X, W, x=X), "multiple values for argument 'x'"),
        (lambda: rms_norm(X.double(), W.double()), "x must be one of fp32, fp16, bf16, got float64"),
        (lambda: rms_norm(X, W.half()), "weight must be fp32 as x is, got fp16"),
        (lambda: rms_norm(X, W[:4]), r"weight must be \[8\] as x's rows are, got \[4\]"),
        (lambda: rms_norm(X, torch.ones(16)[::2]), "weight must be contiguous, got stride 2"),
        (lambda: rms_norm(X, torch.ones(4, 8)), r"weight must be \[8\] as x's rows are, got \[4, 8\]"),
        (lambda: rms_norm(torch.tensor(1.0), W), r"x must be \[\.\.\., N\], got a scalar"),
        (lambda: rms_norm(X.t().contiguous().t(), W), "x must have stride 1 along its last dimension"),
        (lambda: softmax(torch.ones(4, 3, 8).transpose(0, 1)), "rows evenly spaced"),
        (lambda: rms_norm(X[:1].expand(4, 8), W), "x must not be expanded, got stride 0 along dimension 0 of size 4"),
        (lambda: rms_norm(X, torch.ones(1).expand(8)), "weight must not be expanded"),
        (lambda: rms_norm(X.to_sparse(), W), "x must be dense .* got torch.sparse_coo"),
        (lambda: rms_norm(X.to(torch.complex64), W), "x must be one of fp32, fp16, bf16, got complex64"),
        (lambda: rms_norm(torch.complex(X, X).conj().imag, W), "lazily negated view"),
        (lambda: rms_norm(X.to("meta"), W.to("meta")), "x must hold data, got a meta tensor"),
        (lambda: rms_norm(X, W.to("meta")), "weight must hold data, got a meta tensor"),
        (lambda: rms_norm(torch.nested.nested_tensor([W, W]), W), "x must be a plain tensor, got a nested one"),
        (lambda: rms_norm(X, W, backend="cobol"), "backend must be one of numba, .*, got 'cobol'"),
        (lambda: rms_norm(X, W, config=3), "config= needs backend="),
        (lambda: rms_norm(X, W, backend="numba", config=3), r"config must be numba's Config\(.*\), got 3"),
        (lambda: rms_norm(X, W, backend=["numba"]), r"backend must be one of .*, got \['numba'\]"),
        (lambda: rms_norm(X, W, backend="numba", config={"parallel": True}), r"config must be numba's Config"),
        (lambda: rms_norm(X, W, out=X.to_sparse()), r"out\[0\] must be dense"),
        (lambda: rms_norm(X, W, out=torch.zeros(4, 8, requires_grad=True)), r"out\[0\] must not require grad"),
        (lambda: rms_norm(X, W, out=W), r"out\[0\] must be fp32\[4, 8\] .*, got fp32\[8\]"),
        (lambda: rms_norm(X, W, out=3), r"out\[0\] must be a Tensor, got int"),
        (lambda: rms_norm(X, W, out=(X, X)), r"out must be 1 tensor\(s\), got 2"),
        (lambda: rms_norm(X, W, out=X), r"out\[0\] must not share memory"),
        (lambda: silu_mul(X, X[:2]), r"up must be \[4, 8\] as gate is, got \[2, 8\]"),
        (lambda: matmul(A, B.half()), "b must be fp32 as a is, got fp16"),
        (lambda: matmul(A[0], B), r"a must be a matrix, got shape \[8\]"),
        (lambda: matmul(A, B.t()), r"must agree in K, got \[4, 8\] and \[6, 8\]"),
        (lambda: matmul(torch.ones(8, 16)[::2, ::2], B), "a must have stride 1 along one dimension"),
        (lambda: linear(X, B.t().half()), "weight must be fp32 as x is, got fp16"),
        (lambda: linear(X, B), r"weight must be \[N, 8\], to agree in K with x .*, got \[8, 6\]"),
        (lambda: linear(X, W), r"weight must be \[N, 8\], .*, got \[8\]"),
        (lambda: linear(X, torch.ones(3, 8), W), r"bias must be fp32\[3\], got fp32\[8\]"),
    ],
)
def test_bad_input_is_named(call, message):
    rms_norm(X, W)  # a recent plan is asked first: it must not take what it should not
    with pytest.raises(BadInput, match=message):
        call()


def test_tensors_on_two_devices_are_named():
    x, w = (TensorSpec.contiguous(s, torch.float32, d) for s, d in (((4, 8), "cuda:0"), ((8,), "cpu")))
    with pytest.raises(BadInput, match="all tensors must be on one device, got x on cuda:0, weight on cpu"):
        rms_norm.plan((x, w))


def test_a_call_without_gradients_does_not_open_the_way_for_one_with():
    w = torch.nn.Parameter(W.clone())
    with torch.no_grad():
        for _ in range(3):
            rms_norm_fp8(X, w)
    with pytest.raises(NoBackward, match="weight requires grad"):
        rms_norm_fp8(X, w)
    with torch.no_grad():
        assert torch.equal(rms_norm_fp8(X, w)[1], rms_norm_fp8(X, W)[1])


@pytest.mark.parametrize("call", [rms_norm_fp8, torch.ops.tilery.rms_norm_fp8], ids=["direct", "torch.ops"])
def test_grad_is_refused_not_cut(call):
    w = torch.nn.Parameter(W.clone())
    with pytest.raises(NoBackward, match="rms_norm_fp8 has no backward and weight requires grad"):
        call(X, w)
    with torch.no_grad():
        assert torch.equal(call(X, w)[1], rms_norm_fp8(X, W)[1])


def test_defaults_and_keywords_mean_the_same():
    wanted = rms_norm(X, W, 1e-6)
    for got in (rms_norm(X, W), rms_norm(X, weight=W), rms_norm(x=X, weight=W, eps=1e-6), rms_norm(weight=W, x=X)):
        assert torch.equal(got, wanted)


def test_out_is_written():
    out = torch.full_like(X, 7.0)
    assert rms_norm(X, W, out=out) is out
    assert torch.allclose(out, reference(X, W))


def test_out_is_seen_by_autograd():
    out, g = torch.randn(4, 8), torch.randn(4, 8, requires_grad=True)
    saved = (g * out).sum()
    rms_norm(X, W, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()


def test_numpys_scalars_are_pythons():
    for choice in ({}, {"backend": "numba"}):
        assert torch.equal(rms_norm(X, W, np.float64(0.5), **choice), rms_norm(X, W, 0.5))
        assert torch.equal(rms_norm(X, W, True, **choice), rms_norm(X, W, 1.0))


def test_a_copy_of_an_op_is_the_op():
    holder = {"f": rms_norm}
    assert copy.deepcopy(holder)["f"] is rms_norm and pickle.loads(pickle.dumps(rms_norm)) is rms_norm
    assert repr(rms_norm).startswith("<tilery op rms_norm(x: ")


def test_registry_names_are_the_public_names():
    assert set(REGISTRY) <= set(tilery.__all__), "name a new op in catalogue.py"
    assert all(getattr(tilery, name) is op for name, op in REGISTRY.items())
