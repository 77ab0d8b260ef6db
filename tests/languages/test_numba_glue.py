"""Numba: how launches are bound and compiled, and code that is kept on disk."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("numba")
from numba import prange

from tilery.base.launch import Argument, Launch, Scalar
from tilery.base.spec import TensorSpec
from tilery.languages import numba_glue
from tilery.languages.numba_elements import STORAGE, at, f32, store

CPU = torch.device("cpu")
TARGET, NUMBER = Argument.at_slot(TensorSpec.contiguous((8,), torch.float32, "cpu"), 0), Scalar(1, float)
FP32 = STORAGE[torch.float32]


@numba_glue.kernel
def _fill(threads, target, n, value, dtype):
    for i in prange(n):
        store(target, i, f32(value), dtype)


@numba_glue.kernel
def _note(threads, target, pair, dtype):
    """Writes the number of threads, and what is in a tuple."""
    start, value = pair
    store(target, 0, f32(threads), dtype)
    store(at(target, start, dtype), 0, f32(value), dtype)


def fill(kernel=_fill, **more):
    args = {"target": TARGET, "n": 3, "value": NUMBER, "dtype": FP32}
    return Launch(kernel, **{"grid": 1, "args": args} | more)


def filled(launch, value=2.0):
    target = torch.zeros(8)
    numba_glue.bind(launch, CPU)((target, value))
    return target.tolist()


# Launches


def test_a_bound_launch_finds_its_tensors_and_scalars_in_every_call():
    run = numba_glue.bind(fill(), CPU)
    for value in (2.0, 5):
        target = torch.zeros(8)
        run((target, value))
        assert target.tolist() == [value] * 3 + [0.0] * 5
    view = {"target": TARGET.at(4), "n": 2, "value": NUMBER.then(lambda v: 2 * v), "dtype": FP32}
    assert filled(fill(args=view)) == [0.0] * 4 + [4.0] * 2 + [0.0] * 2


def test_arguments_and_constants_are_given_by_name():
    args, constants = {"dtype": FP32, "target": TARGET}, {"value": 7.0, "n": 1}
    assert filled(fill(args=args, constants=constants))[:2] == [7.0, 0.0]


@pytest.mark.parametrize("parallel", [True, False])
def test_a_kernel_is_told_of_its_threads_and_given_tuples(parallel, monkeypatch):
    monkeypatch.setattr(numba_glue, "_threads", 5)
    args = {"target": TARGET, "pair": (3, NUMBER), "dtype": FP32}
    found = filled(Launch(_note, 1, args, options={"parallel": parallel}), 9.0)
    assert found[0] == (5.0 if parallel else 1.0) and found[3] == 9.0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"target": TARGET, "count": 3, "value": NUMBER, "dtype": FP32},
         "_fill takes target, n, value, dtype; the launch lacks n and names count, which it does not take"),
        ({"target": TARGET, "n": 3, "value": NUMBER}, "_fill takes .*; the launch lacks dtype"),
    ],
)  # fmt: skip
def test_a_launch_that_does_not_fit_its_kernel_is_named(args, message):
    with pytest.raises(AssertionError, match=message):
        numba_glue.bind(fill(args=args), CPU)


def test_a_kernel_whose_first_parameter_is_not_threads_is_named():
    kernel = numba_glue.kernel(lambda target: None)
    with pytest.raises(AssertionError, match=r"first parameter of .* must be threads, got target"):
        numba_glue.bind(Launch(kernel, 1, {}), CPU)


# Compiled code


def test_code_on_disk_is_looked_at_without_compiling_it_again():
    made = numba_glue.compile(fill(), "cpu")
    assert "define" in made.code["ir"] and "ret" in made.code["asm"] and made.arch == "cpu"
    anew = numba_glue.kernel(_fill.py_func)  # as another process would have it
    assert numba_glue.compile(fill(anew), "cpu").code["asm"] == made.code["asm"]
    assert list(anew.stats.cache_hits.values()) == [1] and not anew.stats.cache_misses


def test_a_launch_runs_what_was_compiled_ahead():
    """A runtime scalar and a tuple have the types that a call gives them."""
    for launch in (fill(), Launch(_note, 1, {"target": TARGET, "pair": (3, NUMBER), "dtype": FP32})):
        kernel = numba_glue.kernel(launch.kernel.py_func)
        numba_glue.compile(Launch(kernel, 1, launch.args), "cpu")
        before = list(kernel.overloads)
        filled(Launch(kernel, 1, launch.args))
        assert list(kernel.overloads) == before


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b[:-9] + bytes(9), lambda b: b""])
def test_damaged_code_on_disk_is_built_anew(suffix, damage):
    """Truncated, garbled or empty: the call must not see a pickle's or LLVM's error, then or ever after."""
    filled(fill())
    kept = sorted(Path(_fill.stats.cache_path).glob(f"test_numba_glue._fill-*.{suffix}"))
    assert kept
    for path in kept:
        path.write_bytes(damage(path.read_bytes()))
    again, after = (numba_glue.kernel(_fill.py_func) for _ in range(2))  # as two other processes would have it
    assert filled(fill(again))[:4] == [2.0] * 3 + [0.0] and sum(again.stats.cache_misses.values()) == 1
    filled(fill(after))
    assert sum(after.stats.cache_hits.values()) == 1, "what was damaged was not replaced"
    assert all(numba_glue._read(str(path)) for path in kept)  # raises for a damaged one


def test_a_full_disk_costs_the_cache_and_not_the_call(monkeypatch):
    def full(self, path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(numba_glue._HashedFiles, "_write", full)
    one = numba_glue.kernel(lambda threads, target, value, dtype: store(target, 0, f32(value), dtype))
    args = {"target": TARGET, "value": NUMBER, "dtype": FP32}
    with pytest.warns(UserWarning, match="cannot keep compiled kernels, each process builds them: .*No space left"):
        assert filled(Launch(one, 1, args), 5.0)[0] == 5.0


def test_numba_without_its_compiler_is_a_refusal():
    code = (
        "import torch, tilery\n"
        "try: tilery.softmax(torch.randn(3, 8), backend='numba')\n"
        "except tilery.errors.NoBackend as error: print(error)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "NUMBA_DISABLE_JIT is set: unset it before Python starts" in run.stdout


def test_the_first_kernel_of_a_process_may_ask_for_no_threads():
    """numba does not know its threading layer before one does."""
    program = (
        "import torch, tilery\n"
        "found = tilery.moe_align(torch.tensor([[1, 0]], dtype=torch.int32), None, 2, backend='numba')\n"
        "assert tilery.softmax(torch.ones(4, 4), backend='numba').sum() == 4\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
