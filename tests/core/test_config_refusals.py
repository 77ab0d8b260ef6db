"""A config with nonsense in it is refused in a sentence, whatever the kernel, before anything divides by it."""

import dataclasses

import pytest

from cases import plain_case
from tilery import languages
from tilery.core import policy
from tilery.core.cases import call_for
from tilery.core.op import REGISTRY
from tilery.hardware.gpu import KNOWN, pretend

KERNELS = [pytest.param(op, kernel, id=f"{op.name}-{kernel}") for op in REGISTRY.values() for kernel in op.kernels]


@pytest.mark.parametrize(("op", "name"), KERNELS)
def test_sizes_below_one_and_odd_warps_are_refused(op, name):
    if why := languages.missing(name):
        pytest.skip(why)
    with pretend(KNOWN["h200"]):
        call = call_for(op, plain_case(op, ("fp16", "fp32"), name), "cpu" if name == "numba" else "cuda:0")
        kernel = op.kernel(name)
        default = kernel.default(call)
        assert policy.problem_refusal(op, name, call, default) is None
        for field in dataclasses.fields(default):
            if type(getattr(default, field.name)) is not int:
                continue
            wrong = [-1] if field.default == 0 or name == "numba" else [-1, 0]
            for value in wrong + ([3, 48] if field.name == "num_warps" else []):
                why = policy.problem_refusal(op, name, call, dataclasses.replace(default, **{field.name: value}))
                assert why and field.name in why and why.endswith(f"got {value}"), (field.name, value, why)
