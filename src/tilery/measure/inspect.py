"""What a compiler made of a kernel: source, IR, CUDA, PTX, SASS. Without a GPU too."""

import sys
from pathlib import Path
from types import ModuleType

from tilery.base.errors import BadInput
from tilery.base.spec import Artifact
from tilery.core.op import Op
from tilery.hardware import toolkit

STAGES = ("source", "ir", "cuda", "ptx", "sass", "asm")


def source(op: Op, kernel: str) -> str:
    """The kernel's file, and those of its family and language that it takes something from: .cu files, helpers."""
    module = sys.modules[type(op.kernel(kernel)).__module__]
    first, *others = _files(module, op.package)
    shared = [f"\n# {other.name}\n" + other.read_text(encoding="utf-8") for other in others]
    return first.read_text(encoding="utf-8") + "".join(shared)


def _files(module: ModuleType, package: str) -> list[Path]:
    """The module's file, the .cu files that it names, and files of the package that it has something from."""
    found: dict[Path, None] = {Path(str(module.__file__)): None}
    waiting = [module]
    while waiting:
        now = waiting.pop()
        classes = [v for v in vars(now).values() if isinstance(v, type) and v.__module__ == now.__name__]
        values = [*vars(now).values(), *(v for kind in classes for v in vars(kind).values())]
        found |= {v: None for v in values if isinstance(v, Path) and v.suffix == ".cu"}
        for value in values:
            name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
            if not isinstance(name, str) or not name.startswith(f"{package}.") or name not in sys.modules:
                continue
            path = Path(str(sys.modules[name].__file__))
            if path not in found:
                found[path] = None
                waiting.append(sys.modules[name])
    return list(found)


def stages(artifact: Artifact) -> list[str]:
    made = {"source", *artifact.code, *(["sass"] if artifact.cubin else [])}
    return [stage for stage in STAGES if stage in made]


def stage(artifact: Artifact, name: str) -> str:
    """The text of one stage after source."""
    if name not in stages(artifact):
        raise BadInput(f"this kernel has the stages {', '.join(stages(artifact))}, got {name!r}")
    return toolkit.sass(artifact.cubin) if name == "sass" and artifact.cubin else artifact.code[name]
