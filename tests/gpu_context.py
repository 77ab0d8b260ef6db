"""Ends a process whose CUDA context a kernel has broken."""

import os
import sys

import pytest
import torch


def pytest_runtest_logfinish(nodeid):
    """A kernel that left its memory ends its process's context: every later test there would fail for it."""
    if not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        said = f"the GPU's context broke in {nodeid}: {str(error).splitlines()[0]}"
        if "PYTEST_XDIST_WORKER" in os.environ:
            print(said, file=sys.stderr, flush=True)
            os._exit(1)  # pytest-xdist starts another worker for the tests that are left
        pytest.exit(said + "; with -n 2 the tests after it would run too", returncode=1)
