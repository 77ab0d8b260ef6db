"""The parameters of an op: completed, bound, told apart by what decides a plan, referred to by a launch."""

import numpy as np
import pytest
import torch
from torch import Tensor

from tilery.base.errors import BadInput
from tilery.base.launch import Argument, Scalar
from tilery.core.signature import Signature

X, W = torch.randn(4, 8), torch.randn(8)


def reference(
    x: Tensor, w: Tensor | None, eps: float = 1e-6, seed: int = 0, scale: float | None = None, twice: bool = False
) -> Tensor:
    raise AssertionError("a signature is read, never called")


SIGNATURE = Signature("toy", reference, runtime=("eps", "seed", "scale"))
DEFAULTS = (1e-6, 0, None, False)


def test_parameters_are_in_order_and_know_their_kinds():
    assert SIGNATURE.names == ("x", "w", "eps", "seed", "scale", "twice")
    assert SIGNATURE.decisive == ("x", "w", "twice")
    assert [str(kind) for kind in SIGNATURE.kinds] == [
        "Tensor", "Tensor or None", "float or int", "int", "float or None or int", "bool",
    ]  # fmt: skip


def test_a_tensor_after_a_scalar_is_a_mistake_in_the_contract():
    def mixed(eps: float, x: Tensor) -> Tensor:
        return x

    with pytest.raises(AssertionError, match="mixed: tensors come before scalars"):
        Signature("mixed", mixed, ())


# Arguments


@pytest.mark.parametrize(
    ("args", "kwargs", "complete"),
    [
        ((X, W), {}, (X, W, *DEFAULTS)),
        ((X,), {"w": None}, (X, None, *DEFAULTS)),
        ((), {"w": W, "x": X, "seed": 3}, (X, W, 1e-6, 3, None, False)),
        ((X, W, 0.5, 1, 2.0, True), {}, (X, W, 0.5, 1, 2.0, True)),
    ],
)
def test_every_argument_comes_in_order(args, kwargs, complete):
    found = SIGNATURE.complete(args, kwargs)
    assert all(a is b or a == b for a, b in zip(found, complete, strict=True))


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((X,), {}, r"toy: missing a required argument: 'w'; it takes \(x: "),
        ((X, W), {"epsilon": 1}, "unexpected keyword argument 'epsilon'"),
        ((X, W), {"x": X}, "multiple values for argument 'x'"),
        ((X, W, *DEFAULTS, 7), {}, "too many positional arguments"),
    ],
)
def test_what_does_not_complete_is_named(args, kwargs, message):
    with pytest.raises(BadInput, match=message):
        SIGNATURE.complete(args, kwargs)


def test_bound_scalars_are_pythons_own():
    bound = SIGNATURE.bind((X, W, np.float64(0.5), True, np.float64(2.0), False))
    assert [type(v) for v in bound[2:5]] == [float, int, float] and bound[2:5] == (0.5, 1, 2.0) and bound[0] is X


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((X, W, 0.5, 0, None, 1), "toy: twice must be bool, got int"),
        ((X, W, "1", 0, None, False), "toy: eps must be float or int, got str"),
        ((X, 3, *DEFAULTS), "toy: w must be Tensor or None, got int"),
        ((X, W, 0.5, 2**63, None, False), "toy: seed must be an integer of 64 bits, got 9223372036854775808"),
        ((X.to_sparse(), W, *DEFAULTS), "toy: x must be dense"),
    ],
)
def test_what_does_not_bind_is_named(args, message):
    with pytest.raises(BadInput, match=message):
        SIGNATURE.bind(args)


# What decides


def key(x=X, w=W, eps=1e-6, seed=0, scale=None, twice=False, backend=None, config=None):
    return SIGNATURE.key((x, w, eps, seed, scale, twice), backend, config)


def test_a_key_holds_what_decides_and_no_runtime_scalar():
    assert key() == key(x=X.clone(), eps=0.5, seed=7, scale=2.0)
    others = [
        key(x=X[:2]), key(x=X.half()), key(x=torch.randn(4, 16)[:, :8]), key(x=torch.randn(33)[1:].view(4, 8)),
        key(x=X.to("meta")), key(w=None), key(twice=True), key(backend="numba"), key(backend="numba", config=3),
    ]  # fmt: skip
    assert len({key(), *others}) == 1 + len(others)


def test_what_is_not_plain_has_no_key():
    graded = X.clone().requires_grad_()
    assert key(x=graded) is None
    with torch.no_grad():
        assert key(x=graded) == key()
    for other in ({"x": [1.0]}, {"eps": "1"}, {"seed": 2**63}, {"x": X.to_sparse()}, {"twice": 1}):
        assert key(**other) is None
    assert key(x=torch.complex(X, X).conj().imag) is None


@pytest.mark.parametrize("w", [W, None], ids=["given", "left out"])
def test_a_guard_takes_what_has_the_same_key(w):
    takes = SIGNATURE.guard((X, w, *DEFAULTS))
    assert takes((X.clone(), w, 0.5, 7, 2.0, False))
    for other in ((X, None if w is not None else W, *DEFAULTS), (X, w, *DEFAULTS[:-1], True), (X[:2], w, *DEFAULTS),
                  (X, w, 0.5, 2**63, None, False), (torch.randn(33)[1:].view(4, 8), w, *DEFAULTS)):  # fmt: skip
        assert not takes(other)


def test_there_is_no_guard_for_what_is_not_aligned():
    assert SIGNATURE.guard((torch.randn(33)[1:].view(4, 8), W, *DEFAULTS)) is None


# Specs and references


def test_specs_are_of_what_decides():
    specs = SIGNATURE.specs((X, None, 0.5, 7, 2.0, True))
    assert specs[0].shape == (4, 8) and specs[1:] == (None, True)
    assert SIGNATURE.specs((X[:, 1:], W, *DEFAULTS))[0].aligned is False
    assert SIGNATURE.specs((X[:, 1:], W, *DEFAULTS), aligned=True)[0].aligned is True  # of a tensor without data


def test_references_name_tensors_and_runtime_scalars_by_their_places():
    found = SIGNATURE.references(SIGNATURE.specs((X, None, 0.5, 7, 2.0, True)))
    assert list(found) == list(SIGNATURE.names)
    assert isinstance(found["x"], Argument) and found["x"].slot == 0 and found["w"] is None and found["twice"] is True
    assert [(found[n].slot, found[n].kind) for n in ("eps", "seed", "scale")] == [(2, float), (3, int), (4, float)]
    values = (X, None, 3, 7, None, True)
    assert all(isinstance(found[n], Scalar) for n in ("eps", "seed", "scale"))
    assert [found[n].value(values) for n in ("eps", "seed", "scale")] == [3.0, 7, None]
