"""Reads a compiled cubin: registers, spills, shared memory, SASS. Serves every language that makes one."""

import os
import re
import subprocess
import tempfile
from typing import NamedTuple

from tilery.backends import toolkit


class Resources(NamedTuple):
    registers: int  # per thread
    spills: int  # bytes of stack per thread
    shared: int  # static bytes per block; from sm_90 on they hold the 1 KB that the driver keeps of every block


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
        program = toolkit.find(tool)
        # cuobjdump calls nvdisasm, which lies beside it
        env = {**os.environ, "PATH": f"{program.parent}{os.pathsep}{os.environ.get('PATH', '')}"}
        command = [str(program), flag, file.name]
        return subprocess.run(command, check=True, capture_output=True, encoding="utf-8", env=env).stdout
