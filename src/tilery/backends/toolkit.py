"""Where NVIDIA's tools, headers and libraries are: pip's packages, which share one tree, else a CUDA toolkit's."""

import functools
import importlib.util
import os
import shutil
from pathlib import Path

from tilery.errors import ToolMissing


def folders(name: str) -> list[Path]:
    """The folders bin, include or lib that are here, pip's first."""
    roots = [Path(p) / "cu13" for p in _package("nvidia")]
    if home := os.environ.get("CUDA_HOME"):
        roots.append(Path(home))
    return [root / name for root in roots if (root / name).is_dir()]


def _package(name: str) -> list[str]:
    spec = importlib.util.find_spec(name)
    return list(spec.submodule_search_locations or []) if spec else []


def find(tool: str) -> Path:
    """A program: pip's, else Triton's own, else the toolkit's."""
    own = [Path(p) / "backends/nvidia/bin" for p in _package("triton")]
    for folder in [*folders("bin"), *own]:
        if (folder / tool).is_file():
            return folder / tool
    if on_path := shutil.which(tool):
        return Path(on_path)
    raise ToolMissing(f"{tool} is not here: pip install 'tilery[nvcc]', or put a CUDA toolkit's bin folder on PATH")


@functools.cache
def includes() -> tuple[str, ...]:
    """Where cuda_fp16.h is and, if it is there, CUDA's standard library."""
    for folder in folders("include"):
        if (folder / "cuda_fp16.h").is_file():
            return tuple(str(path) for path in (folder, folder / "cccl") if path.is_dir())
    raise ToolMissing("cuda_fp16.h is not here: pip install 'tilery[cuda]', or set CUDA_HOME to a CUDA toolkit")
