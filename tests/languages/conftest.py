"""What tests of languages share: a current device and a stream, without a GPU."""

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
