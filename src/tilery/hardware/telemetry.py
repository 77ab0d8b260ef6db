"""Clock, power and temperature of a GPU while it works, through NVML; nothing on a CPU or without nvidia-ml-py."""

import functools
import statistics
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch


class Reading(NamedTuple):
    clock: float  # MHz of the SMs
    power: float  # W
    temperature: float  # °C


Watch = Callable[[], Reading | None]


@functools.cache
def watch(device: torch.device) -> Watch:
    """A function that reads the device's state now."""
    if device.type != "cuda":
        return lambda: None
    try:
        import pynvml  # of nvidia-ml-py
    except ModuleNotFoundError:
        return lambda: None
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        read = functools.partial(_read, pynvml, handle)
        read()
    except pynvml.NVMLError:  # some virtual machines hide the card's sensors
        return lambda: None
    return read


def _read(nvml: "object", handle: object) -> Reading:
    clock = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)  # type: ignore[attr-defined]
    milliwatts = nvml.nvmlDeviceGetPowerUsage(handle)  # type: ignore[attr-defined]
    celsius = nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)  # type: ignore[attr-defined]
    return Reading(float(clock), milliwatts / 1e3, float(celsius))


def median(readings: Iterable[Reading | None]) -> Reading | None:
    there = [reading for reading in readings if reading is not None]
    return Reading(*map(statistics.median, zip(*there))) if there else None
