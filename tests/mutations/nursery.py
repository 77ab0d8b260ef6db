"""A process that has imported torch and Numba, and forks a child for each run of pytest: to import them takes longest.

An order is a line of JSON on stdin, {"arguments", "environment", "paths", "folder", "output", "limit_s"}; the answer is
a line on stdout, {"code"}: pytest's exit code, the negative number of a signal, or null where the time was up.
"""

import contextlib
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PRELOADED = ("pytest", "torch", "numba")  # nothing that starts threads or looks for a GPU: neither bears a fork
_GLANCE_S = 0.02


class Nursery:
    """The other end: a process that is asked for one run after another."""

    def __init__(self, preload: Sequence[str] = PRELOADED) -> None:
        here = Path(__file__).parents[1]
        environment = os.environ | {
            "PYTHONPATH": str(here),
            "OMP_WAIT_POLICY": "passive",  # as the conftest has it, before torch is imported
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        }
        command = [sys.executable, "-m", "mutations.nursery", *preload]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, **order: Any) -> int | None:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(order), file=self._process.stdin, flush=True)
        code: int | None = json.loads(self._process.stdout.readline())["code"]
        return code

    def close(self) -> None:
        self._process.communicate()


def _answered(order: dict[str, Any]) -> int | None:
    child = os.fork()
    if child == 0:
        try:
            _run(order)
        finally:
            os._exit(70)  # whatever happened: it must not go on as its parent
    end = time.monotonic() + order["limit_s"]
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(_GLANCE_S)
    os.killpg(child, signal.SIGKILL)  # its own children too
    os.waitpid(child, 0)
    return None


def _run(order: dict[str, Any]) -> None:
    os.setsid()
    output = os.open(order["output"], os.O_WRONLY | os.O_CREAT)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, nothing), (1, output), (2, output)):
        os.dup2(source, target)
    os.environ.update(order["environment"])
    os.environ["PYTHONPATH"] = os.pathsep.join(order["paths"])
    sys.path[:0] = order["paths"]
    os.chdir(order["folder"])
    random.seed()  # else all children would draw the same numbers

    import pytest

    code = int(pytest.main(order["arguments"]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    for module in sys.argv[1:]:
        with contextlib.suppress(ModuleNotFoundError):  # Numba's tests are skipped then, and the runner says so
            importlib.import_module(module)
    for line in sys.stdin:
        print(json.dumps({"code": _answered(json.loads(line))}), flush=True)
