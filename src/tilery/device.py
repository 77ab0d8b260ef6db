"""What this machine is, and how fast it can be: ceilings are measured on it once and kept."""

import contextlib
import contextvars
import functools
import json
import os
import platform
import re
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from tilery import settings

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
    if info.exists() and (found := re.search(r"model name\s*: (.+)", info.read_text())):
        model = found.group(1)
    return f"CPU {model} x{cores()}"


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


@dataclass(frozen=True)
class Ceilings:
    """The best this machine did when it was asked: nothing runs much faster."""

    bandwidth: float  # bytes/s of a large copy, read and written
    flops: dict[str, float]  # dtype name -> FLOP/s of a large matrix product

    def roof_ms(self, flops: int, nbytes: int, dtype: str) -> float:
        rate = self.flops.get(dtype, max(self.flops.values()))
        return 1e3 * max(flops / rate, nbytes / self.bandwidth)


def ceilings(where: torch.device, measure: bool = False) -> Ceilings:
    """Measured once per device, kept in the data folder; `measure` measures again."""
    path = settings.get().data_dir / "ceilings" / f"{slug(where)}.json"
    if path.exists() and not measure:
        try:
            return Ceilings(**json.loads(path.read_text()))
        except (ValueError, TypeError) as error:
            warnings.warn(f"{path} cannot be read ({error}); measuring again", stacklevel=2)
    found = _measured(where)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.tmp")
        partial.write_text(json.dumps(asdict(found)))
        partial.replace(path)
    except OSError as error:
        warnings.warn(f"{path} cannot keep what was measured: {error}", stacklevel=2)
    return found


def _measured(where: torch.device) -> Ceilings:
    from tilery import timing

    elements, n = (2**28, 8192) if where.type == "cuda" else (2**24, 1024)
    source = torch.randn(elements, device=where)
    target = torch.empty_like(source)
    # Not copy_: in a CUDA graph that is a memcpy node, which ran at 2.8 TB/s on an H200 where kernels reach 4.3.
    copy = timing.best_ms(lambda: torch.mul(source, 1.5, out=target), where)
    flops = {}
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    if where.type == "cuda":
        dtypes["fp16"] = torch.float16  # on a CPU torch multiplies fp16 so slowly that it is no ceiling
    for dtype_name, dtype in dtypes.items():
        a, b = (torch.randn(n, n, device=where).to(dtype) for _ in range(2))
        flops[dtype_name] = 2 * n**3 / timing.best_ms(lambda a=a, b=b: a @ b, where) * 1e3  # type: ignore[misc]
    return Ceilings(bandwidth=2 * elements * 4 / copy * 1e3, flops=flops)
