"""Compiling ahead fills the cache that a launch reads, or it would be work done twice; and who is launched early."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tilery import languages
from tilery.base.spec import TensorSpec
from tilery.core.op import REGISTRY
from tilery.hardware import device


def test_a_launch_finds_what_was_compiled_ahead():
    if why := languages.missing("triton"):
        pytest.skip(why)
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("triton_keys.py")
    made = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=300)
    assert made.returncode == 0, made.stderr
    found, said = json.loads(made.stdout)
    assert set(found) == {op.name for op in REGISTRY.values() if "triton" in op.kernels}
    assert [name for name, same in found.items() if not same] == []
    assert "must call take_over() before it touches memory" in said


@pytest.mark.parametrize(
    ("marked", "arch", "interpreted", "early"),
    [(True, "sm_90", False, True), (True, "sm_100", False, True), (True, "sm_89", False, False),
     (False, "sm_90", False, False), (True, "sm_90", True, False)],
)  # fmt: skip
def test_a_kernel_starts_early_where_it_says_so_and_the_device_can(monkeypatch, marked, arch, interpreted, early):
    if why := languages.missing("triton"):
        pytest.skip(why)
    from tilery.languages import triton_glue

    class Kernel:
        def __getitem__(self, grid):
            return lambda *arguments, **named: launched.append((grid, arguments, named))

    launched, kernel, x = [], Kernel(), TensorSpec.contiguous((1,), torch.float32, "cuda:0")
    monkeypatch.setattr(triton_glue, "_INTERPRETED", interpreted)
    monkeypatch.setattr(triton_glue, "_starts_early", triton_glue._starts_early.__wrapped__)  # keeps no answer
    with device.pretend(arch):
        triton_glue.launch(triton_glue.early(kernel) if marked else kernel, (3,), (x,), {"BLOCK": 8}, {"num_warps": 2})
    assert launched == [((3,), (x,), {"BLOCK": 8, "num_warps": 2} | ({"launch_pdl": True} if early else {}))]
