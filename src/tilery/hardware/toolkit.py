"""NVIDIA's tools, headers and libraries, pip's or a CUDA toolkit's; and what the tools say of a cubin."""

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from tilery.base.errors import ToolMissing


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


# Compiled code


class Resources(NamedTuple):
    registers: int  # per thread
    spills: int  # bytes of stack per thread
    shared: int  # static bytes per block; from sm_90 on they hold the 1 KB that the driver keeps of every block


def resources(cubin: bytes) -> Resources:
    """What a cubin's kernel takes; of several, the one that uses most registers."""
    text = _run("cuobjdump", "--dump-resource-usage", cubin)
    found = [dict(re.findall(r"\b([A-Z]+):(\d+)", line)) for line in text.splitlines() if "REG:" in line]
    usage = max(found, key=lambda entry: int(entry["REG"]))
    return Resources(int(usage["REG"]), int(usage["STACK"]), int(usage["SHARED"]))


def sass(cubin: bytes) -> str:
    return _run("cuobjdump", "--dump-sass", cubin)


def _run(tool: str, flag: str, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        program = find(tool)
        # cuobjdump calls nvdisasm, which lies beside it
        env = {**os.environ, "PATH": f"{program.parent}{os.pathsep}{os.environ.get('PATH', '')}"}
        command = [str(program), flag, file.name]
        return subprocess.run(command, check=True, capture_output=True, encoding="utf-8", env=env).stdout
