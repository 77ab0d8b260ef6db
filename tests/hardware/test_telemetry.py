"""Clock, power and temperature through NVML, or nothing."""

import sys
from types import SimpleNamespace

import pytest
import torch

from tilery.hardware import telemetry
from tilery.hardware.telemetry import Reading

CUDA = torch.device("cuda", 0)


class NvmlError(Exception):
    pass


def nvml(**changed):
    return SimpleNamespace(**{
        "NVMLError": NvmlError, "NVML_CLOCK_SM": 1, "NVML_TEMPERATURE_GPU": 0, "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda uuid: uuid, "nvmlDeviceGetClockInfo": lambda handle, kind: 1980,
        "nvmlDeviceGetPowerUsage": lambda handle: 653_210, "nvmlDeviceGetTemperature": lambda handle, kind: 51,
    } | changed)  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    telemetry.watch.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda where: SimpleNamespace(uuid="1234"))
    yield
    telemetry.watch.cache_clear()


def test_what_the_card_says(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", nvml())
    assert telemetry.watch(CUDA)() == Reading(1980.0, 653.21, 51.0)


def test_a_cpu_says_nothing():
    assert telemetry.watch(torch.device("cpu"))() is None


def test_without_the_package_or_the_sensors_nothing_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert telemetry.watch(CUDA)() is None
    telemetry.watch.cache_clear()

    def hidden(handle):
        raise NvmlError

    monkeypatch.setitem(sys.modules, "pynvml", nvml(nvmlDeviceGetPowerUsage=hidden))
    assert telemetry.watch(CUDA)() is None


def test_medians_leave_out_what_was_not_read():
    readings = [Reading(1.0, 2.0, 3.0), None, Reading(3.0, 4.0, 5.0), Reading(9.0, 0.0, 4.0)]
    assert telemetry.median(readings) == Reading(3.0, 2.0, 4.0) and telemetry.median([None]) is None
