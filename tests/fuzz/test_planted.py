"""The fuzzer can fail: it finds every bug of planted.py, and what it prints does it again."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fuzz import planted
from fuzz.call import Call, parsed
from fuzz.child import Child
from fuzz.fuzz import fuzz
from fuzz.run import run
from fuzz.strategies import draw
from tilery.core.op import REGISTRY

SOFTMAX = REGISTRY["softmax"]
TESTS = Path(__file__).parents[1]
SAYS = {
    "write_behind": "wrote outside of an output or workspace: element 0 behind it",
    "write_in_a_gap": "wrote outside of x: element inside it",
    "read_behind": "output 0",
    "dropped_tail": "output 0",
    "wrong_element": "output 0",
    "wrote_its_input": "wrote its input x",
    "nondeterministic": "the same call twice gives different bits",
    "raises": "raised ZeroDivisionError: rows of one value",
    "aborts": "ended the process with code -6",
}


def test_every_planted_bug_is_tested():
    mine = {n for n, v in vars(planted).items() if getattr(v, "__module__", "") == planted.__name__ and n[0] != "_"}
    assert mine == set(SAYS)


class Here:
    """Runs calls in this process: quicker than a child, for bugs that do not end it."""

    run = staticmethod(run)


@pytest.fixture
def kernel_restored(monkeypatch):
    kind = type(SOFTMAX.kernel("numba"))
    monkeypatch.setattr(kind, "launches", kind.launches)


@pytest.mark.usefixtures("kernel_restored")
@pytest.mark.parametrize("bug", [name for name in SAYS if name != "aborts"])
def test_planted_bug_is_found(bug):
    getattr(planted, bug)()
    report = fuzz(SOFTMAX, "numba", "planted", 60, Here())
    assert report.failures, "not found in 60 calls"
    assert re.search(SAYS[bug], report.failures[0][1]), report.failures[0]


@pytest.mark.usefixtures("kernel_restored")
def test_failure_is_made_smaller():
    planted.dropped_tail()
    call = fuzz(SOFTMAX, "numba", "planted", 40, Here()).failures[0][0]
    assert call.params["m"] == 1 and call.params["n"] < 16 and not (call.plants or call.layouts or call.config)


@pytest.mark.slow
def test_what_is_printed_does_it_again(monkeypatch):
    """A bug that ends the process: the call that died is known, and its call is made smaller in new ones."""
    monkeypatch.setattr("fuzz.fuzz._FEW_TRIES", 2)  # each starts a process
    with Child("aborts") as child:
        call, why = fuzz(SOFTMAX, "numba", "planted", 12, child).failures[0]
    assert re.search(SAYS["aborts"], why), why
    command = shlex.split(call.reproduction)
    assert command[:2] == ["PYTHONPATH=tests", "python"]
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    again = subprocess.run(
        [sys.executable, *command[2:], "--plant", "aborts"], env=os.environ | {"PYTHONPATH": path},
        capture_output=True, text=True,
    )  # fmt: skip
    assert again.returncode == 1 and re.search(f"failed: {SAYS['aborts']}", again.stdout), again


def test_a_dead_child_is_followed_by_a_new_one():
    with Child("aborts") as child:
        odd, even = (Call("softmax", "numba", {"m": 1, "n": n, "dtype": "fp32"}) for n in (3, 4))
        assert [child.run(call).kind for call in (even, odd, even)] == ["passed", "failed", "passed"]


def test_seed_decides_the_call():
    one, same, other = (str(draw(SOFTMAX, "numba", seed)) for seed in ("7", "7", "8"))
    assert one == same != other
    assert str(parsed(one)) == one
