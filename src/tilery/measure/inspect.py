"""What a compiler made of a kernel: source, IR, CUDA, PTX, SASS. Without a GPU too."""

import inspect as python
import sys
from pathlib import Path
from types import ModuleType

from tilery.base.errors import BadInput
from tilery.base.spec import Artifact
from tilery.core.op import Op
from tilery.languages import toolkit

STAGES = ("source", "ir", "cuda", "ptx", "sass", "asm")


def source(op: Op, kernel: str) -> str:
    """The kernel's file, the .cu beside it if it has one, and the files of its language that it shares with others."""
    module = op.kernel(kernel)
    path = Path(python.getfile(module))
    cuda = path.with_name(f"{op.name}.cu")
    others = [cuda] if kernel.startswith("cuda") and cuda.exists() else []
    others += _shared(module, kernel.partition(".")[0])
    shared = [f"\n# {other.name}\n" + other.read_text(encoding="utf-8") for other in others]
    return path.read_text(encoding="utf-8") + "".join(shared)


def _shared(module: ModuleType, language: str) -> list[Path]:
    """Files parts/<language>_*.py that the module has something from, and those that they have something from."""
    found: dict[Path, None] = {}
    waiting = [module]
    while waiting:
        for value in vars(waiting.pop()).values():
            name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
            if not isinstance(name, str) or not name.startswith(f"tilery.parts.{language}_"):
                continue
            path = Path(python.getfile(sys.modules[name]))
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
