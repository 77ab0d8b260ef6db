"""What this machine is. How fast it can be is in ceilings.py."""

import contextlib
import contextvars
import functools
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path

import torch

# What the project builds for: one of each kind of card in use. A kernel that builds for all of them says so with this.
ARCHS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")

_pretended: contextvars.ContextVar[str | None] = contextvars.ContextVar("arch", default=None)

# Shared memory one block may have, in bytes, by architecture (CUDA C++ Programming Guide, compute capabilities).
_SHARED = {"sm_80": 163, "sm_86": 99, "sm_87": 163, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_103": 227}


def arch(where: torch.device) -> str:
    """sm_90 for an H200, cpu for a CPU; inside `pretend`, what is pretended."""
    if where.type != "cuda":
        return "cpu"
    return _pretended.get() or _present_arch(where)


def arch_number(where: torch.device) -> int:
    """90 for an H200; 0 for a CPU."""
    return number(arch(where))


def number(name: str) -> int:
    """90 for sm_90; 0 for cpu."""
    return int(name.removeprefix("sm_")) if name != "cpu" else 0


@functools.cache
def _present_arch(where: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(where)
    return f"sm_{major}{minor}"


@contextlib.contextmanager
def pretend(present: str) -> Iterator[None]:
    """Inside, CUDA devices are of this architecture: for planning and compiling without them."""
    token = _pretended.set(present)
    try:
        yield
    finally:
        _pretended.reset(token)


def shared_limit(present: str) -> int:
    """Bytes of shared memory that one block may have."""
    return _SHARED.get(present, 99) * 1024


@functools.cache
def name(where: torch.device) -> str:
    return torch.cuda.get_device_name(where) if where.type == "cuda" else _cpu_name()


def slug(where: torch.device) -> str:
    """The name as a file name: nvidia_h200."""
    return re.sub(r"[^a-z0-9]+", "_", name(where).lower()).strip("_")


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
