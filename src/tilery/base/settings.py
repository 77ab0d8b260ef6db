"""What the environment may set, read here and nowhere else. A change drops every held plan."""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import platformdirs

from tilery.base.errors import BadSetting

_SGLANG = "SGLANG_TILELANG_GEMM_CONFIG_DIR"
_SWITCH = {"0": False, "1": True}


@dataclass(frozen=True)
class Settings:
    data_dir: Path  # TILERY_DATA_DIR: ceilings, the user's tuned configs
    cache_dir: Path  # TILERY_CACHE_DIR: compiled kernels; may be deleted at any time
    config_dir: Path  # TILERY_CONFIG_DIR: tuned configs, searched before the shipped ones
    sglang_dir: Path | None = None  # SGLANG_TILELANG_GEMM_CONFIG_DIR: where SGLang looks for configs of its products
    explain: bool = False  # TILERY_EXPLAIN=1: print every new plan
    tuned: bool = True  # TILERY_TUNED=0: dispatch leaves tuned configs out
    check_indices: bool = False  # TILERY_CHECK_INDICES=1: the host looks at lengths, offsets, pages, targets and ids
    emulate: bool = False  # TILERY_EMULATE=1: kernels in CUDA C++ take CPU tensors, in the emulator
    vendor: bool = True  # TILERY_VENDOR=0: kernels of cuBLAS and the like refuse everything


def from_environment() -> Settings:
    data = _folder("TILERY_DATA_DIR", lambda: platformdirs.user_data_dir("tilery"))
    return Settings(
        data_dir=data,
        cache_dir=_folder("TILERY_CACHE_DIR", lambda: platformdirs.user_cache_dir("tilery")),
        config_dir=_folder("TILERY_CONFIG_DIR", lambda: str(data / "tuned")),
        sglang_dir=_folder(_SGLANG, lambda: "") if os.environ.get(_SGLANG) else None,
        explain=_switch("TILERY_EXPLAIN"),
        tuned=_switch("TILERY_TUNED", default="1"),
        check_indices=_switch("TILERY_CHECK_INDICES"),
        emulate=_switch("TILERY_EMULATE"),
        vendor=_switch("TILERY_VENDOR", default="1"),
    )


def _switch(variable: str, default: str = "0") -> bool:
    value = os.environ.get(variable) or default
    if value not in _SWITCH:
        raise BadSetting(f"{variable} must be 0 or 1, got {value!r}")
    return _SWITCH[value]


def _folder(variable: str, default: Callable[[], str]) -> Path:
    given = os.environ.get(variable)
    try:
        path = Path(given or default()).expanduser().absolute()
    except (RuntimeError, OSError):
        why = "this user has no home folder, or the working folder is gone"
        raise BadSetting(f"{variable} must name a folder by its whole path, got {given or 'nothing'}: {why}") from None
    for each in (path, *path.parents):
        if not os.path.isdir(each) and os.path.lexists(each):
            below = "" if each == path else f", below which {path} cannot be"
            raise BadSetting(f"{variable} must name a folder, got the file {each}{below}")
    return path


_current: Settings | None = None
_listeners: list[Callable[[], None]] = []


def get() -> Settings:
    global _current
    if _current is None:
        _current = from_environment()
    return _current


def on_change(listener: Callable[[], None]) -> None:
    _listeners.append(listener)


def change(**changes: Any) -> None:
    """Sets fields for the rest of this process."""
    global _current
    _current = replace(get(), **changes)
    for listener in _listeners:
        listener()


@contextlib.contextmanager
def override(**changes: Any) -> Iterator[Settings]:
    """Sets fields inside a `with` block."""
    before = get()
    change(**changes)
    try:
        yield get()
    finally:
        change(**{name: getattr(before, name) for name in changes})
