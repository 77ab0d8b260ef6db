"""What ends a process whose CUDA context is broken."""

import os

import pytest
import torch

from gpu_context import pytest_runtest_logfinish


def _broken():
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore lines")


@pytest.fixture
def broken(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", _broken)
    return monkeypatch


def test_a_process_whose_context_is_broken_ends(broken):
    broken.delenv("PYTEST_XDIST_WORKER", raising=False)
    with pytest.raises(pytest.exit.Exception, match=r"broke in tests/test_it\.py: CUDA error: an illegal"):
        pytest_runtest_logfinish("tests/test_it.py")


def test_a_worker_whose_context_is_broken_ends_for_another_to_start(broken, capsys):
    codes = []
    broken.setenv("PYTEST_XDIST_WORKER", "gw0")
    broken.setattr(os, "_exit", lambda code: codes.append(code) or (_ for _ in ()).throw(SystemExit(code)))
    with pytest.raises(SystemExit):
        pytest_runtest_logfinish("tests/test_it.py")
    assert codes == [1] and "broke in tests/test_it.py" in capsys.readouterr().err


def test_a_context_that_works_and_none_at_all_change_nothing(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: asked.append(1))
    for there in (False, True):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda there=there: there)
        pytest_runtest_logfinish("tests/test_it.py")
    assert asked == [1]
