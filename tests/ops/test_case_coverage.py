"""Every number, flag and word that an op takes is varied by its test cases, and so that it changes what is checked."""

import functools
import inspect

import pytest
import torch

from cases import size
from tilery.base.errors import BadInput
from tilery.core.op import REGISTRY
from tilery.measure.check import reference

SCALARS = [
    pytest.param(op, name, id=f"{op.name}-{name}")
    for op in REGISTRY.values()
    for name, parameter in op.signature.python.parameters.items()
    if "Tensor" not in str(parameter.annotation)
]


@pytest.mark.parametrize(("op", "name"), SCALARS)
def test_some_case_varies_it(op, name):
    require_varied(op, name, tuple(op.cases["test"]))


@pytest.mark.parametrize(("op", "name"), [("rms_norm", "eps"), ("cross_entropy", "ignore_index"), ("sample", "top_p")])
def test_a_scalar_that_is_forgotten_is_found(op, name):
    kept = tuple(case for case in REGISTRY[op].cases["test"] if name not in case.params)
    with pytest.raises(pytest.fail.Exception, match=f"no test case of {op} has a {name} that changes the result"):
        require_varied(REGISTRY[op], name, kept)


def require_varied(op, name, cases):
    """Some case gives another value than the default, or than another case, and that one would give another result."""
    place, default = op.names.index(name), op.signature.python.parameters[name].default
    others = [] if default is inspect.Parameter.empty else [default]
    for args in drawn(op, cases):
        if any(args[place] != other and matters(op, args, place, other) for other in others):
            return
        others = others or [args[place]]
    pytest.fail(f"no test case of {op.name} has a {name} that changes the result; all have {others}")


def drawn(op, cases):
    """The arguments of each case, smallest first; those whose rows lie far apart have no scalars of their own."""
    sizes = sizes_of(op)
    near = [case for case in cases if "far" not in case.params.values()]
    for seed, case in enumerate(sorted(near, key=lambda case: sizes[str(case)])):
        yield op.complete((), op.inputs(**case.params, device="cpu", seed=seed))


@functools.cache
def sizes_of(op):
    return {str(case): size(op, case) for case in op.cases["test"]}


def matters(op, args, place, other):
    """Whether the call would be refused, or its outputs or its tolerance be others, or the result of the reference."""
    changed = (*args[:place], other, *args[place + 1 :])
    one = op.call(op.specs(args))
    try:
        two = op.call(op.specs(changed))
    except BadInput:
        return True
    if op.output_specs(one) != op.output_specs(two) or op.tolerance(one) != op.tolerance(two):
        return True
    pairs = zip(reference(op, args), reference(op, changed), strict=True)
    return not all(
        a.shape == b.shape and torch.allclose(a.double(), b.double(), 1e-3, 1e-6, equal_nan=True) for a, b in pairs
    )
