"""What tests of languages share: a current device and a stream, without a GPU, and emulated kernels."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from launches import STREAM


@pytest.fixture
def current(monkeypatch):
    """The current device, whose `index` a test may change; streams are STREAM of device 0 and one more of device 1."""
    now = SimpleNamespace(index=0)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: now.index, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM + index, raising=False)
    return now


@pytest.fixture
def kernel(tmp_path):
    """Makes a kernel that is emulated; `broken=(before, after)` plants a mistake."""
    from emulated import Kernel  # which skips where nothing can be emulated

    made = itertools.count()

    def make(text, broken=None):
        if broken is not None:
            assert text.count(broken[0]) == 1, broken[0]
            text = text.replace(*broken)
        folder = tmp_path / str(next(made))
        folder.mkdir()
        return Kernel(folder, text)

    return make
