"""What tests of kernels for one architecture share."""

import pytest

from tilery import device


@pytest.fixture
def hopper():
    with device.pretend("sm_90"):
        yield
