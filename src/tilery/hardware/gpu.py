"""What a GPU is: asked of the one that is here, or known of one that is pretended."""

import contextlib
import contextvars
import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

# What the project builds for: one of each kind of card in use. A kernel that builds for all of them says so with this.
ARCHS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")

_KIB, _MIB = 2**10, 2**20
# The first architecture that has something: its number.
HOPPER = 90  # wgmma, which is Hopper's alone
PDL = TMA = CLUSTERS = HOPPER
FP8_CONVERSION = 89


@dataclass(frozen=True)
class Gpu:
    """What defaults of kernels depend on."""

    name: str
    arch: str  # sm_90
    sms: int
    shared_per_block: int  # bytes of shared memory that one block may have
    shared_per_sm: int  # bytes; every resident block takes `reserved_shared` of them besides its own
    l2: int  # bytes
    registers_per_sm: int = 65536
    reserved_shared: int = _KIB

    @property
    def number(self) -> int:
        """90 for sm_90."""
        return arch_number(self.arch)

    @property
    def sms_power_of_2(self) -> int:
        """The largest power of two that is not above the number of SMs: 128 for an H200."""
        return 1 << self.sms.bit_length() - 1

    @property
    def l2_for_reuse(self) -> int:
        """Bytes that blocks which run together may share through L2: about half, 32 MiB for an H200."""
        return self.l2 * 8 // 15

    @property
    def largest_cluster(self) -> int:
        """Blocks of a cluster that every such device is promised to run at once."""
        return 8 if self.number >= CLUSTERS else 1


def arch_number(arch: str) -> int:
    """90 for sm_90, 0 for cpu."""
    return int(arch.removeprefix("sm_")) if arch != "cpu" else 0


# Shared memory by architecture: CUDA C++ Programming Guide, compute capabilities.
_SHARED = {"sm_80": 163, "sm_86": 99, "sm_87": 163, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_103": 227}
_LEAST_SHARED = 99


def _known(name: str, arch: str, sms: int, l2: int) -> Gpu:
    shared = _SHARED.get(arch, _LEAST_SHARED)
    return Gpu(name, arch, sms, shared * _KIB, (shared + 1) * _KIB, l2 * _MIB)


KNOWN = {
    "a100": _known("NVIDIA A100-SXM4-80GB", "sm_80", 108, 40),
    "rtx4090": _known("NVIDIA GeForce RTX 4090", "sm_89", 128, 72),
    "l40s": _known("NVIDIA L40S", "sm_89", 142, 96),
    "h100-pcie": _known("NVIDIA H100 PCIe", "sm_90", 114, 50),
    "h200": _known("NVIDIA H200", "sm_90", 132, 60),
    "b200": _known("NVIDIA B200", "sm_100", 148, 126),
    "rtx5090": _known("NVIDIA GeForce RTX 5090", "sm_120", 170, 96),
}
# Which one an architecture stands for where nothing else is said.
_TYPICAL = {"sm_80": "a100", "sm_89": "l40s", "sm_90": "h200", "sm_100": "b200", "sm_120": "rtx5090"}

_pretended: contextvars.ContextVar[Gpu | None] = contextvars.ContextVar("gpu", default=None)


def gpu(where: torch.device) -> Gpu:
    """The GPU of a CUDA device; inside `pretend`, what is pretended. On a CPU, where Triton interprets, an H200."""
    return _pretended.get() or (_present(where) if where.type == "cuda" else KNOWN["h200"])


@functools.cache
def _present(where: torch.device) -> Gpu:
    found = torch.cuda.get_device_properties(where)
    arch = f"sm_{found.major}{found.minor}"
    known = _SHARED.get(arch, _LEAST_SHARED) * _KIB
    return Gpu(
        found.name, arch, found.multi_processor_count,
        getattr(found, "shared_memory_per_block_optin", known),
        getattr(found, "shared_memory_per_multiprocessor", known + _KIB),
        found.L2_cache_size, getattr(found, "regs_per_multiprocessor", 65536),
    )  # fmt: skip


@contextlib.contextmanager
def pretend(what: str | Gpu) -> Iterator[None]:
    """Inside, every CUDA device is this GPU: a name of KNOWN, or an architecture. For planning and compiling."""
    chosen = what if isinstance(what, Gpu) else KNOWN.get(what) or _of_arch(what)
    token = _pretended.set(chosen)
    try:
        yield
    finally:
        _pretended.reset(token)


def _of_arch(arch: str) -> Gpu:
    return KNOWN[_TYPICAL[arch]] if arch in _TYPICAL else _known(f"a GPU of {arch}", arch, 80, 32)
