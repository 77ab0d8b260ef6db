"""Calls in forked children, as a DataLoader makes them: Numba's threads do not outlive a fork."""

import os
import sys
import traceback

import pytest
import torch

import tilery
from tilery.core.op import REGISTRY

pytest.importorskip("numba")
if not hasattr(os, "fork"):
    pytest.skip("no fork on this system", allow_module_level=True)

from tilery.languages import numba_glue
from tilery.measure.check import check

NUMBA = [op for op in REGISTRY.values() if "numba" in op.kernels]


def in_child(function):
    """Run it in a forked child; its exit code is 0 unless it raised or was killed."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            function()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.fixture
def one_thread():
    """Torch's own threads do not outlive a fork either: who forks sets this, as DataLoader does."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def start_numbas_threads():
    tilery.rms_norm(torch.randn(64, 4096), torch.randn(4096), backend="numba")


def parallel_config(op, args):
    """The config that takes all threads; the default of a small problem takes one."""
    configs = op.kernel("numba").configs(op.call(op.specs(args)))
    return next((c for c in configs if getattr(c, "parallel", False)), None)


@pytest.mark.parametrize("op", NUMBA, ids=lambda op: op.name)
def test_every_numba_kernel_runs_in_a_forked_child(op, one_thread):
    start_numbas_threads()
    case = next(c for c in op.cases["test"] if "numba" not in c.refused_by and 0 not in c.params.values())
    args = op.complete((), op.inputs(**case.params, device="cpu", seed=0))
    config = parallel_config(op, args)
    assert in_child(lambda: check(op, "numba", case, "cpu", seed=0, config=config)) == 0


@pytest.mark.parametrize("per", ["tensor", "token", "group", "block"])
def test_every_granularity_of_quantize_fp8_runs_in_a_forked_child(per, one_thread):
    start_numbas_threads()
    x = torch.randn(300, 256)
    want = tilery.quantize_fp8(x, per=per)

    def child():
        got = tilery.quantize_fp8(x, per=per)
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(got, want))

    assert in_child(child) == 0


def test_a_child_is_told_of_one_thread():
    start_numbas_threads()

    def child():
        assert numba_glue.threads(True) == 1

    assert in_child(child) == 0
    assert in_child(lambda: pytest.fail("a child that fails is seen")) == 1


def test_the_first_numba_call_keeps_torchs_number_of_threads():
    """In a process of its own: Numba starts its threads once."""
    code = (
        "import torch, tilery\n"
        "torch.set_num_threads(1)\n"
        "tilery.rms_norm(torch.randn(64, 4096), torch.randn(4096), backend='numba')\n"
        "assert torch.get_num_threads() == 1, torch.get_num_threads()\n"
    )
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0
