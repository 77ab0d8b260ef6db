"""What this machine is. How fast it can be is in measure/ceilings.py."""

import functools
import os
import platform
import re
from pathlib import Path

import torch

from tilery.hardware.gpu import ARCHS as ARCHS
from tilery.hardware.gpu import arch_number as number
from tilery.hardware.gpu import gpu as gpu
from tilery.hardware.gpu import pretend as pretend


def arch(where: torch.device) -> str:
    """sm_90 for an H200, cpu for a CPU; inside `pretend`, what is pretended."""
    return gpu(where).arch if where.type == "cuda" else "cpu"


def arch_number(where: torch.device) -> int:
    """90 for an H200, 0 for a CPU."""
    return number(arch(where))


def name(where: torch.device) -> str:
    return gpu(where).name if where.type == "cuda" else _cpu_name()


def slug(where: torch.device) -> str:
    """The name as a file name: nvidia_h200."""
    return re.sub(r"[^a-z0-9]+", "_", name(where).lower()).strip("_")


@functools.cache
def _cpu_name() -> str:
    """The model as the kernel names it; clouds call many of them alike, so the number of cores stands with it."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists() and (found := re.search(r"model name\s*: (.+)", info.read_text(encoding="utf-8"))):
        model = found.group(1)
    return f"CPU {model} x{cores()}"


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
