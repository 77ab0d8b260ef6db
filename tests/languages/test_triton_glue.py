"""Triton: the first launch goes through Triton, the others to the compiled kernel; a launch finds what was compiled."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from launches import EPS, GPU, STREAM, X, Y, values

from processes import HANG_S
from tilery import languages

if why := languages.missing("triton"):
    pytest.skip(why, allow_module_level=True)

from triton import knobs

from tilery.base.launch import Argument, Launch, Persistent, Scalar
from tilery.base.spec import TensorSpec
from tilery.core.op import REGISTRY
from tilery.hardware import device
from tilery.languages import triton_glue


def test_a_launch_finds_what_was_compiled_ahead():
    """Or compiling ahead would be work done twice."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("triton_keys.py")
    made = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=HANG_S)
    assert made.returncode == 0, made.stderr
    wrong, said = json.loads(made.stdout)
    assert set(wrong) == {op.name for op in REGISTRY.values() if "triton" in op.kernels}
    assert {name: why for name, why in wrong.items() if why} == {}
    assert "is launched with pdl=True, so it must call pdl_wait() before it touches memory" in said


# Bound launches, of a kernel that is not compiled


class Kernel:
    """As a JIT function: it writes down how it is launched, and what it compiled does too.

    `typed`: its parameters have types. `general`: they are not specialized on their values.
    """

    __name__ = "scale"

    def __init__(self, *names, typed=False, general=False):
        self.arg_names, self.log = list(names), []
        how = {"annotation_type": "i64" if typed else "", "do_not_specialize": general}
        self.params = [SimpleNamespace(name=name, **how) for name in names]

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            self.log.append(("triton", grid, arguments, options))
            return SimpleNamespace(run=self.run, function="function", packed_metadata="metadata")

        return launch

    def run(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *arguments):
        assert (function, metadata, launch_metadata) == ("function", "metadata", None)
        self.log.append(("compiled", (x, y, z), arguments, stream))

    @property
    def ways(self):
        return [way for way, *_ in self.log]


@pytest.fixture(autouse=True)
def compiled(monkeypatch, current):
    """Architectures that a launch is compiled for, to be looked at, before it runs."""
    made = []
    monkeypatch.setattr(triton_glue, "_INTERPRETED", False)
    monkeypatch.setattr(triton_glue, "compile", lambda launch, arch: made.append(arch))
    return made


def scale(kernel=None, arch="sm_90", **more):
    """The kernel and its bound launch."""
    kernel = kernel or Kernel("x_ptr", "y_ptr", "eps", "n", "BLOCK")
    plain = {"args": {"n": 32, "eps": EPS, "y_ptr": Y, "x_ptr": X}, "constants": {"BLOCK": 8}}
    launch = Launch(kernel, **{"grid": 3, "options": {"num_warps": 2}} | plain | more)
    with device.pretend(arch):
        return kernel, triton_glue.bind(launch, GPU)


def test_the_first_call_goes_through_triton_and_the_others_to_what_it_compiled():
    kernel, run = scale(grid=(3, 2))
    assert kernel.log == []
    calls = [values(0.5), values(0.25), values(2)]
    for call in calls:
        run(call)
    (_, grid, arguments, options), *later = kernel.log
    assert (grid, options) == ((3, 2), {"num_warps": 2})
    assert arguments[0] is calls[0][0] and arguments[1] is calls[0][1] and arguments[2:] == (0.5, 32, 8)
    for call, (way, sizes, arguments, stream) in zip(calls[1:], later, strict=True):
        assert (way, sizes, stream) == ("compiled", (3, 2, 1), STREAM)
        assert arguments[0] is call[0] and arguments[1] is call[1] and arguments[2:] == (float(call[2]), 32, 8)


@pytest.mark.parametrize(
    ("change", "arch", "looked_at"),
    [
        ({}, "sm_90", []),
        ({"aligned": False}, "sm_90", ["sm_90"]),
        ({"aligned": False}, "sm_80", []),
        ({"shape": (3, 8), "strides": (24, 1)}, "sm_90", ["sm_90"]),
        ({"shape": (1, 8), "strides": (24, 1)}, "sm_90", []),  # there is no next row
    ],
)
def test_code_is_looked_at_where_tensors_cannot_be_loaded_by_16_bytes(change, arch, looked_at, compiled):
    """Behind it ptxas 12.8 forgets to set registers, on Hopper."""
    spec = TensorSpec.contiguous((4, 16), torch.float16, GPU)._replace(**change)
    kernel = Kernel("group", "n")
    launch = Launch(kernel, 1, {"group": (Argument.at_slot(spec, 0), None), "n": 7})
    with device.pretend(arch):
        triton_glue.bind(launch, GPU)
    assert compiled == looked_at


def test_the_interpreter_is_given_floats_that_fp32_holds():
    """It would make fp64 of others, as of a scale of 1e-50."""

    class Group(NamedTuple):
        scale: float
        rows: int

    given = triton_glue._in_fp32(Group(-1e-50, 3)), triton_glue._in_fp32((2.0**-126, "x"))
    assert given == (Group(0.0, 3), (2.0**-126, "x")) and str(given[0].scale) == "-0.0"
    assert triton_glue._in_fp32(float("nan")) != triton_glue._in_fp32(float("nan"))


def test_every_device_has_its_own_code(current):
    kernel, run = scale()
    for index in (0, 1, 0, 1):
        current.index = index
        run(values())
    assert kernel.ways == ["triton", "triton", "compiled", "compiled"]
    assert [stream for way, *_, stream in kernel.log if way == "compiled"] == [STREAM, STREAM + 1]


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_while_a_profiler_listens_every_call_goes_through_triton(monkeypatch, hook):
    """Triton's own launcher tells it what a launch is; the short way could not."""
    kernel, run = scale()
    run(values())
    run(values())
    with monkeypatch.context() as patch:
        patch.setattr(knobs.runtime, hook, lambda metadata: None)
        run(values())
        run(values())
    run(values())
    assert kernel.ways == ["triton", "compiled", "triton", "triton", "compiled"]


def test_a_chain_of_hooks_counts_if_somebody_is_in_it(monkeypatch):
    kernel, run = scale()
    run(values())
    for calls in ([], [print]):
        monkeypatch.setattr(knobs.runtime, "launch_enter_hook", SimpleNamespace(calls=calls))
        run(values())
    assert kernel.ways == ["triton", "compiled", "triton"]


@pytest.mark.parametrize(
    ("kind", "how", "ways"),
    [
        (int, {}, ["triton", "triton"]),
        (int, {"typed": True}, ["triton", "triton"]),
        (int, {"general": True}, ["triton", "triton"]),
        (int, {"typed": True, "general": True}, ["triton", "compiled"]),
        (float, {}, ["triton", "compiled"]),
    ],
)
def test_an_integer_that_may_change_the_code_goes_through_triton_every_time(kind, how, ways):
    """Triton compiles for integers that are 1 or multiples of 16, and for their size, unless the kernel says not to."""
    kernel = Kernel("seed", "y_ptr", **how)
    _, run = scale(kernel, args={"seed": Scalar(2, kind), "y_ptr": Y}, constants={})
    for seed in (1, 16):
        run(values(seed))
    assert kernel.ways == ways and [arguments[0] for _, _, arguments, _ in kernel.log] == [1, 16]


def test_a_scalar_among_the_constants_has_code_of_its_own_for_each_value():
    kernel = Kernel("y_ptr", "CAUSAL")
    _, run = scale(kernel, args={"y_ptr": Y}, constants={"CAUSAL": Scalar(2, bool)})
    for causal in (True, False, True, False):
        run(values(causal))
    assert kernel.ways == ["triton", "triton", "compiled", "compiled"]
    assert [arguments[1] for _, _, arguments, _ in kernel.log] == [True, False, True, False]


class Strided(NamedTuple):
    ptr: Any
    stride: Any


def test_a_view_is_a_pointer_and_a_group_keeps_its_names():
    kernel = Kernel("x", "y_ptr")
    _, run = scale(kernel, args={"x": Strided(X.at(4), 8), "y_ptr": Y._replace(dtype=torch.int32)}, constants={})
    x, y, _ = call = values()
    run(call)
    ((_, _, (group, bits), _),) = kernel.log
    assert isinstance(group, Strided) and group.stride == 8
    assert (group.ptr.data_ptr(), group.ptr.dtype) == (x.data_ptr() + 16, torch.float32)
    assert (bits.data_ptr(), bits.dtype) == (y.data_ptr(), torch.int32)


@pytest.mark.parametrize(
    ("pdl", "arch", "dependent"),
    [(True, "sm_90", True), (True, "sm_100", True), (True, "sm_89", False), (False, "sm_90", False)],
)
def test_a_kernel_is_launched_as_a_dependent_where_it_says_so_and_the_device_can(pdl, arch, dependent):
    kernel, run = scale(arch=arch, pdl=pdl)
    run(values())
    ((*_, options),) = kernel.log
    assert options == {"num_warps": 2} | ({"launch_pdl": True} if dependent else {})


def test_the_interpreter_is_given_tensors_and_no_options(monkeypatch):
    monkeypatch.setattr(triton_glue, "_INTERPRETED", True)
    kernel = Kernel("x_ptr", "y_ptr")
    _, run = scale(kernel, args={"x_ptr": X.view((8,), (1,), 8), "y_ptr": Y}, constants={}, pdl=True)
    for call in (values(), values()):
        run(call)
        way, grid, (x, y), options = kernel.log[-1]
        assert (way, grid, options) == ("triton", (3,), {}) and y is call[1] and torch.equal(x, call[0][1])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"args": {"x_ptr": X, "y_ptr": Y, "eps": EPS, "size": 32}},
         "scale takes x_ptr, y_ptr, eps, n, BLOCK; the launch lacks n and names size, which it does not take"),
        ({"constants": {}}, "scale takes .*; the launch lacks BLOCK"),
        ({"grid": Persistent(4)}, "a grid of Triton's is given by numbers"),
    ],
)  # fmt: skip
def test_a_launch_that_does_not_fit_its_kernel_is_named(more, message):
    with pytest.raises(AssertionError, match=message):
        scale(**more)


# Descriptors


@pytest.mark.parametrize("layout", [None, "shared"], ids=["Triton's", "Gluon's"])
def test_a_descriptor_is_made_of_the_tensor_that_comes(monkeypatch, layout):
    made = []
    for where in (triton_glue.tensor_descriptor, triton_glue):
        monkeypatch.setattr(where, "TensorDescriptor", lambda *what: made.append(what))
    x, *_ = call = values()
    triton_glue.Descriptor(X.view((2, 8), (8, 1), 8), (2, 4), layout).bound(call)
    ((base, shape, strides, block, *rest),) = made
    assert base.data_ptr() == x.data_ptr() + 32 and (shape, strides, block) == ([2, 8], [8, 1], [2, 4])
    assert rest == ([] if layout is None else [layout])
