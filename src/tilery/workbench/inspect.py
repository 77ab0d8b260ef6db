"""What a compiler made of a kernel: source, IR, CUDA, PTX, SASS. Without a GPU too."""

import inspect as python
from pathlib import Path

from tilery.backends import cubin
from tilery.errors import BadInput
from tilery.op import Op
from tilery.spec import Artifact

STAGES = ("source", "ir", "cuda", "ptx", "sass", "asm")


def source(op: Op, kernel: str) -> str:
    """The kernel's file, and the .cu beside it if it has one."""
    path = Path(python.getfile(op.kernel(kernel)))
    cuda = path.with_name(f"{op.name}.cu")
    text = path.read_text()
    return text + f"\n# {cuda.name}\n{cuda.read_text()}" if kernel.startswith("cuda") and cuda.exists() else text


def stages(artifact: Artifact) -> list[str]:
    made = {"source", *artifact.code, *(["sass"] if artifact.cubin else [])}
    return [stage for stage in STAGES if stage in made]


def stage(artifact: Artifact, name: str) -> str:
    """The text of one stage after source."""
    if name not in stages(artifact):
        raise BadInput(f"this kernel has the stages {', '.join(stages(artifact))}, got {name!r}")
    return cubin.sass(artifact.cubin) if name == "sass" and artifact.cubin else artifact.code[name]
