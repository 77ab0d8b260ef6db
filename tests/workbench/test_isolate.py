"""Arms that take their process with them: the rest goes on."""

import pytest

from processes import package
from tilery.base.errors import BadInput
from tilery.base.spec import case
from tilery.measure.timing import Depth
from tilery.workbench.bench import Unit
from tilery.workbench.isolate import measured

QUICK = Depth(rounds=6, turn_ms=1.0, warm_s=0.0)
PLUGIN = """
import os, signal, torch
from tilery.core.op import REGISTRY

def dies(x):
    os.kill(os.getpid(), signal.SIGSEGV)

def ends_badly(x):
    print("the last words", flush=True)
    os._exit(3)

calls = []
def dies_later(x):
    calls.append(1)
    if len(calls) > 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return x.softmax(-1)

def spoils_the_context(x):
    return x[torch.full_like(x, 10**9, dtype=torch.long)]

REGISTRY["softmax"].baselines |= {
    "baseline:liger": dies, "baseline:quack": ends_badly, "baseline:tilegym": dies_later,
    "baseline:flashinfer": spoils_the_context,
}
"""


@pytest.fixture(autouse=True)
def _bad_peers(tmp_path, monkeypatch):
    """A plug-in that only the child sees."""
    path = package(tmp_path, "[tilery.ops]\nbad = planted.peers\n", planted={"peers": PLUGIN})
    monkeypatch.setenv("PYTHONPATH", path)


def rows(*peers, given=None, device="cpu", kernel="numba"):
    given = given or case(m=8, n=64, dtype="fp32")
    unit = Unit("softmax", given, device, (kernel,), ("baseline:torch", *peers), QUICK)
    return {row.kernel: row for part in measured([unit]) for row in part}


@pytest.mark.parametrize(
    ("peer", "reason"),
    [
        pytest.param("baseline:liger", "its process was killed by signal 11", marks=pytest.mark.slow),
        ("baseline:quack", "its process ended with code 3\nthe last words"),
        pytest.param("baseline:tilegym", "its process was killed by signal 9", marks=pytest.mark.slow),
    ],
)
def test_an_arm_that_kills_its_process_costs_its_own_row(peer, reason):
    found = rows(peer)
    assert found[peer].status == "fail" and reason in found[peer].reason
    assert found["numba"].status == "pass" and found["numba"].ratio > 0 and len(found["numba"].samples) == 6


@pytest.mark.slow
def test_several_of_them_too():
    found = rows("baseline:liger", "baseline:quack", "baseline:tilegym")
    assert [k for k, row in found.items() if row.status == "fail"] == [
        "baseline:liger", "baseline:quack", "baseline:tilegym",
    ]  # fmt: skip
    assert found["numba"].status == "pass"


def test_what_is_wrong_with_a_case_is_raised_here():
    with pytest.raises(BadInput, match="dtype must be one of"):
        rows(given=case(m=8, n=64, dtype="int4"))


@pytest.mark.gpu
def test_a_spoilt_context_costs_its_own_row():
    """A bad index is an assertion on the device, after which every call of the process fails."""
    found = rows("baseline:flashinfer", device="cuda:0", kernel="triton")
    assert found["baseline:flashinfer"].status == "fail" and "crashed" in found["baseline:flashinfer"].reason
    assert found["triton"].status == "pass" and found["triton"].ratio > 0
