"""Compiling ahead fills the cache that a launch reads, or it would be work done twice."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tilery import backends
from tilery.op import REGISTRY


def test_a_launch_finds_what_was_compiled_ahead():
    if why := backends.missing("triton"):
        pytest.skip(why)
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("triton_keys.py")
    made = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=300)
    assert made.returncode == 0, made.stderr
    found = json.loads(made.stdout)
    assert set(found) == {op.name for op in REGISTRY.values() if "triton" in op.kernels}
    assert [name for name, same in found.items() if not same] == []
