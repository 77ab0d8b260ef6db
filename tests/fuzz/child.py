"""A process that runs calls: what ends it does not end the fuzzer, and the call that did is known."""

import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from fuzz.call import Call, parsed
from fuzz.run import Outcome, run

ENDED = "ended the process"
ENDED_CONTEXT = "broke the GPU's context"
_TESTS = Path(__file__).parents[1]


class Child:
    """Runs calls one at a time in another process, and starts a new one when that has died.

    `plant` is a function of planted.py, called there first: the fuzzer's own tests put bugs into kernels by it.
    """

    def __init__(self, plant: str = "") -> None:
        self._plant = plant
        self._process: subprocess.Popen[str] | None = None
        self._said: Any = None

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, call: Call) -> Outcome:
        process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(f"{call}\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if line:
            outcome = Outcome(*json.loads(line))
            if outcome.detail.startswith(ENDED_CONTEXT):
                self.close()
            return outcome
        code, said = process.wait(), self._last_words()
        self.close()
        return Outcome("failed", f"{ENDED} with code {code}" + (f": {said}" if said else ""))

    def _start(self) -> "subprocess.Popen[str]":
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the process
        path = os.pathsep.join([str(_TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fuzz.child", self._plant], env=os.environ | {"PYTHONPATH": path}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said,
        )  # fmt: skip
        return self._process

    def _last_words(self) -> str:
        self._said.seek(0)
        lines = self._said.read().strip().splitlines()
        return " / ".join(lines[-3:])

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.close()
            self._process.wait()
            self._process.stdout.close()
            self._said.close()
        self._process = None


def main(plant: str) -> None:
    """Reads a call a line and answers with its outcome, a line each."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    import tilery.ops  # noqa: F401  fills the registry

    if plant:
        getattr(importlib.import_module("fuzz.planted"), plant)()
    for line in sys.stdin:
        outcome = run(parsed(line))
        if broken := _broken_context():
            outcome = Outcome("failed", f"{ENDED_CONTEXT}: {broken}; {outcome.kind}: {outcome.detail}")
        else:
            _give_memory_back()
        print(json.dumps(outcome), file=answers, flush=True)
        if broken:  # every later call would fail for it
            os._exit(1)


def _give_memory_back() -> None:
    """Other fuzzers may share the GPU, and rows far apart take gigabytes."""
    import torch

    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 2**30:
        torch.cuda.empty_cache()


def _broken_context() -> str | None:
    """What a kernel did to the GPU's context, which no later call can use; None if all is well or there is no GPU."""
    import torch

    if torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            return str(error).partition("\n")[0]
    return None


if __name__ == "__main__":
    main(sys.argv[1])
