"""Reads a compiled cubin: registers, spills, shared memory, SASS. Serves every language that makes one."""

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from tilery.errors import ToolMissing


class Resources(NamedTuple):
    registers: int  # per thread
    spills: int  # bytes of stack per thread
    shared: int  # static bytes per block


def resources(cubin: bytes) -> Resources:
    """Of the kernel in the cubin that uses most registers, should there be several."""
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
        command = [str(find(tool)), flag, file.name]
        # cuobjdump calls nvdisasm, which lies beside it
        env = {**os.environ, "PATH": f"{find(tool).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
        return subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout


def find(tool: str) -> Path:
    """cuobjdump or nvdisasm: pip's, else Triton's own, else the toolkit's."""
    for folder in _folders():
        if (folder / tool).is_file():
            return folder / tool
    if on_path := shutil.which(tool):
        return Path(on_path)
    raise ToolMissing(f"{tool} is not here: pip install 'tilery[nvcc]', or put a CUDA toolkit's bin folder on PATH")


def _folders() -> list[Path]:
    folders = []
    for package, inside in (("nvidia", "cu13/bin"), ("triton", "backends/nvidia/bin")):
        spec = importlib.util.find_spec(package)
        folders += [Path(p) / inside for p in (spec.submodule_search_locations or [])] if spec else []
    return folders + ([Path(home) / "bin"] if (home := os.environ.get("CUDA_HOME")) else [])
