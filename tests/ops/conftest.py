"""What tests of kernels for one architecture share."""

import contextlib

import pytest
import torch

from cases import home
from tilery import languages
from tilery.base import settings
from tilery.hardware import device


@pytest.fixture(autouse=True)
def tensors_at_home(request):
    """A test with a parameter `backend` makes its tensors where that backend runs, unless it says where."""
    callspec = getattr(request.node, "callspec", None)
    backend = callspec.params.get("backend") if callspec else None
    with torch.device(home(backend)) if backend in ("numba", "triton") else contextlib.nullcontext():
        yield


@pytest.fixture
def hopper():
    with device.pretend("sm_90"):
        yield


@pytest.fixture
def launches(monkeypatch):
    """What is handed to the driver, without one: kernels with their arguments, and tensor maps."""
    if why := languages.missing("cuda"):
        pytest.skip(why)
    from hopper_checks import flat

    from tilery.languages import cuda_glue, tensor_maps

    made, maps = [], []
    monkeypatch.setattr(cuda_glue.Kernel, "launch", lambda self, *given: made.append((self, tuple(flat(given)))))
    monkeypatch.setattr(cuda_glue.Kernel, "resident", lambda self: 264 if self.threads == 256 else 132)
    monkeypatch.setattr(tensor_maps, "_made", lambda *how: maps.append(how) or len(maps))
    with settings.override(emulate=False):
        yield made, maps
