"""`tilery sanitize` on a GPU finds bugs that are planted in a package of its own, as a third party's would be."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch

PLANTED_OP = """
import torch
from torch import Tensor
from tilery.core.op import op
from tilery.base.spec import Bucket, Cost, case
@op(check=lambda x: None, outputs=lambda x: (x,), cost=lambda x: Cost(1, x.nbytes, 0), bucket=lambda x: Bucket("", {}),
    inputs=lambda m, dtype, device, seed: {"x": torch.randn(m, device=device)}, allowed={torch.float32: 1e-6},
    cases={"test": [case(m=127, dtype="fp32")]}, kernels=("triton", "cuda"), baselines={})
def planted(x: Tensor) -> Tensor:
    \"\"\"y = x\"\"\"
    return x.clone()
"""
PLANTED_KERNEL = """
from dataclasses import dataclass
archs = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
@dataclass(frozen=True)
class Config:
    pass
def refusal(x, config=None): return None
def default(x): return Config()
def configs(x): return [Config()]
def compile(specs, config, arch): raise NotImplementedError
"""
OVERRUNS = (
    PLANTED_KERNEL
    + """
import triton
import triton.language as tl
@triton.jit
def _overrun(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    tl.store(y_ptr + at, x, mask=at < n + 1)  # one too many
def run(outs, args, config): _overrun[(1,)](args[0], outs[0], args[0].numel(), BLOCK=128)
"""
)
RACES = (
    PLANTED_KERNEL
    + """
from pathlib import Path
from tilery.languages import cuda_glue
_KERNEL = cuda_glue.Kernel(Path(__file__).with_name("races.cu"), "races", "PPi", 128)
def run(outs, args, config): _KERNEL.launch(1, args[0].data_ptr(), outs[0].data_ptr(), args[0].numel())
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


def planted(folder):
    """A package with an op whose Triton kernel writes past its output and whose CUDA kernel lacks a barrier."""
    files = {
        "planted/__init__.py": PLANTED_OP,
        "planted/triton_kernel.py": OVERRUNS,
        "planted/cuda_kernel.py": RACES,
        "planted/races.cu": RACES_CU,
        "planted-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n",
        "planted-1.0.dist-info/entry_points.txt": "[tilery.ops]\nplanted = planted\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_planted_bugs_are_reported_with_their_lines(tmp_path):
    planted(tmp_path)
    command = [sys.executable, "-m", "tilery", "sanitize", "planted", "--tool", "memcheck,racecheck", "--json"]
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path})
    assert done.returncode == 1, done.stderr
    rows = {(row["kernel"], row["tool"]): row for row in json.loads(done.stdout)["rows"]}
    overrun, race = rows["triton", "memcheck"], rows["cuda", "racecheck"]
    line = 1 + OVERRUNS.splitlines().index("    tl.store(y_ptr + at, x, mask=at < n + 1)  # one too many")
    assert overrun["status"] == "finding" and "Invalid __global__ write of size 4" in overrun["what"]
    assert overrun["where"].endswith(f"triton_kernel.py:{line}")
    assert race["status"] == "finding" and "race between" in race["what"] and "races.cu" in race["where"]
    assert rows["cuda", "memcheck"]["status"] == rows["triton", "racecheck"]["status"] == "clean"
