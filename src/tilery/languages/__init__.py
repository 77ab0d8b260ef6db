"""The languages. A missing package is a reason to refuse, with its pip command; a broken import is a bug."""

import functools
import importlib
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from tilery.base.errors import BadInput
from tilery.hardware import device


@dataclass(frozen=True)
class Language:
    name: str
    packages: tuple[str, ...]  # what must be importable
    distribution: str  # what carries its version
    install: str  # the command that adds it
    glue: str  # module with what is per language and not per op
    ours: bool = True  # False: a library's kernels. They run where named or tuned, and no table counts them as ours
    emulated: bool = False  # on a CPU its kernels run where named alone, because an emulator is for tests


def _language(name: str, packages: str, distribution: str, extra: str = "", **traits: bool) -> Language:
    install = f"pip install 'tilery[{extra}]'" if extra else f"pip install {distribution}"
    return Language(name, tuple(packages.split()), distribution, install, f"tilery.languages.{name}_glue", **traits)


LANGUAGES = {
    language.name: language
    for language in (
        _language("triton", "triton", "triton"),
        _language("gluon", "triton.experimental.gluon", "triton"),
        _language("tilelang", "tilelang", "tilelang", "tilelang"),
        _language("cutile", "cuda.tile", "cuda-tile", "cutile"),
        _language("cuda", "cuda.bindings", "cuda-bindings", "cuda", emulated=True),
        _language("cupy", "cupy", "cupy-cuda13x", "cupy"),
        _language("numba", "numba", "numba", "numba"),
        _language("numba_cuda", "numba_cuda cuda.core", "numba-cuda", "numba-cuda"),
        _language("vendor", "torch", "torch", ours=False),
    )
}


def language(kernel: str) -> Language:
    name = kernel.partition(".")[0]
    if name not in LANGUAGES:
        known = ", ".join(LANGUAGES)
        raise BadInput(f"kernel {kernel!r} is of no known language ({known}): name {name!r} in LANGUAGES")
    return LANGUAGES[name]


def is_ours(kernel: str) -> bool:
    """Whether a kernel of this name is written here or by a third party, and not a library's."""
    found = LANGUAGES.get(kernel.partition(".")[0])
    return found is None or found.ours


def runs_unnamed(kernel: str, where: torch.device) -> bool:
    """Whether an untuned call may get this kernel without naming it: not a library's, and not an emulated one."""
    found = LANGUAGES.get(kernel.partition(".")[0])
    return found is None or (found.ours and not (found.emulated and where.type == "cpu"))


def load(kernel: str) -> ModuleType:
    """The glue of the kernel's language, imported on first use."""
    return importlib.import_module(language(kernel).glue)


def installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the parent of a dotted name is not there
        return False


def version(lang: Language) -> str | None:
    try:
        return importlib.metadata.version(lang.distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def missing(kernel: str) -> str | None:
    lang = language(kernel)
    absent = [package for package in lang.packages if not installed(package)]
    return f"{lang.name} is not installed: {lang.install} (no {', '.join(absent)})" if absent else None


def serves(built: str, present: str) -> bool:
    """Code built for sm_80 runs on sm_86, not on sm_90: same major, minor no smaller."""
    if "cpu" in (built, present):
        return built == present
    b, p = map(device.number, (built, present))
    return b // 10 == p // 10 and b <= p


def refusal(kernel: str, where: torch.device, archs: tuple[str, ...], specs: tuple[Any, ...]) -> str | None:
    """Why a kernel that builds for `archs` cannot run in this process on this device."""
    unable = getattr(load(kernel), "machine_refusal", None)
    if unable and (why := unable()):
        return why
    wants = "a CPU tensor" if archs == ("cpu",) else "a CUDA tensor"
    if where.type == "cpu" and "cpu" not in archs:
        interpreter = getattr(load(kernel), "interpreter_refusal", None)
        return interpreter(specs) if interpreter else f"needs {wants}, got one on {where}"
    if where.type != "cpu" and (where.type != "cuda" or archs == ("cpu",)):
        return f"needs {wants}, got one on {where}"
    present = device.arch(where)
    if not any(serves(arch, present) for arch in archs):
        return f"builds for {', '.join(archs)}, and {where} is {present}"
    return None
