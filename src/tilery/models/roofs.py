"""Whose ceilings a plan is held against: this machine's, or those kept of a GPU that is not here."""

import json
from pathlib import Path
from typing import NamedTuple

from tilery.base.errors import BadInput
from tilery.hardware import device
from tilery.measure.ceilings import Ceilings, ceilings

HERE = "here"
_GPUS = Path(__file__).parent / "gpus"  # as `tilery doctor --measure` measured them
_USUAL = "nvidia_h200"


class Roof(NamedTuple):
    device: str
    ceilings: Ceilings


def kept() -> list[str]:
    return sorted(path.stem for path in _GPUS.glob("*.json"))


def find(name: str | None = None) -> Roof:
    """By name, nvidia_h200 or h200 say; `here` is this machine. None: its GPU, or an H200 where it has none."""
    if name == HERE or (name is None and device.default().type == "cuda"):
        return Roof(device.name(device.default()), ceilings(device.default()))
    asked = _USUAL if name is None else name.lower()
    for stem in kept():
        if asked in (stem, stem.removeprefix("nvidia_")):
            values = json.loads((_GPUS / f"{stem}.json").read_text(encoding="utf-8"))
            return Roof(values.pop("name"), Ceilings(**values))
    raise BadInput(f"--device must be {HERE} or one of {', '.join(kept())}, got {name!r}")
