"""`tilery sanitize` on a GPU finds bugs that are planted in a package of its own, as a third party's would be."""

import json
import subprocess
import sys

import pytest
import torch

from processes import package
from tilery.base.spec import TensorSpec
from tilery.measure.compile import Compiler

PLANTED_OP = """
import torch
from torch import Tensor
from tilery.core.op import op
from tilery.base.spec import Bucket, Cost, TensorSpec, case
@op(check=lambda call: None, outputs=lambda call: {"y": TensorSpec(*call.x)},
    cost=lambda call: Cost(1, call.x.nbytes, 0), bucket=lambda call: Bucket("", {}),
    inputs=lambda m, dtype, device, seed: {"x": torch.randn(m, device=device)}, allowed={torch.float32: 1e-6},
    cases={"test": [case(m=127, dtype="fp32")]}, baselines={},
    kernels={"triton": "planted.overruns:overruns", "cuda": "planted.races:races"})
def planted(x: Tensor) -> Tensor:
    \"\"\"y = x\"\"\"
    return x.clone()
"""
KERNEL = """
from dataclasses import dataclass
from tilery.base.launch import Launch
from tilery.core.kernel import Kernel
from tilery.hardware.gpu import ARCHS
@dataclass(frozen=True)
class Config:
    pass
class Planted(Kernel):
    archs, Config = ARCHS, Config
    def default(self, call): return Config()
"""
OVERRUNS = (
    KERNEL
    + """
import triton
import triton.language as tl
@triton.jit
def _overrun(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    tl.store(y_ptr + at, x, mask=at < n + 1)  # one too many
class Overruns(Planted):
    def launches(self, call, config):
        return [Launch(_overrun, 1, {"x_ptr": call.x, "y_ptr": call.y, "n": call.x.shape[0]}, {"BLOCK": 128})]
overruns = Overruns()
"""
)
RACES = (
    KERNEL
    + """
from pathlib import Path
from tilery.languages.cuda_source import Source
class Races(Planted):
    def launches(self, call, config):
        args = {"x": call.x, "y": call.y, "n": call.x.shape[0]}
        return [Launch(Source(Path(__file__).with_name("races.cu"), "races"), 1, args, options={"threads": 128})]
races = Races()
"""
)
RACES_CU = """
__global__ void races(const float *x, float *y, int n) {
    __shared__ float kept[128];
    int i = threadIdx.x;
    kept[i] = i < n ? x[i] : 0.f;
    // __syncthreads() is missing here.
    if (i < n) y[i] = kept[n - 1 - i];
}
"""


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """An op whose Triton kernel writes past its output and whose CUDA kernel lacks a barrier; children see it."""
    modules = {"op": PLANTED_OP, "overruns": OVERRUNS, "races": RACES}
    monkeypatch.setenv("PYTHONPATH", package(tmp_path, "[tilery.ops]\nplanted = planted.op\n", planted=modules))
    (tmp_path / "planted" / "races.cu").write_text(RACES_CU)


def test_the_planted_kernels_build(planted):
    """So that the next test, on a GPU, looks for bugs in kernels that run."""
    specs = (TensorSpec.contiguous((127,), torch.float32, "cuda:0"),)
    with Compiler() as compiler:
        for kernel in ("triton", "cuda"):
            assert compiler.compile("planted", kernel, specs, "sm_90").registers > 0


@pytest.mark.gpu
def test_planted_bugs_are_reported_with_their_lines(planted):
    command = [sys.executable, "-m", "tilery", "sanitize", "planted", "--tool", "memcheck,racecheck", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    rows = {(row["kernel"], row["tool"]): row for row in json.loads(done.stdout)["rows"]}
    overrun, race = rows["triton", "memcheck"], rows["cuda", "racecheck"]
    line = 1 + OVERRUNS.splitlines().index("    tl.store(y_ptr + at, x, mask=at < n + 1)  # one too many")
    assert overrun["status"] == "finding" and "Invalid __global__ write of size 4" in overrun["what"]
    assert overrun["where"].endswith(f"overruns.py:{line}")
    assert race["status"] == "finding" and "race between" in race["what"] and "races.cu" in race["where"]
    assert rows["cuda", "memcheck"]["status"] == rows["triton", "racecheck"]["status"] == "clean"
