"""Third parties add languages, ops and kernels through entry points of their packages."""

import subprocess
import sys
import textwrap

LANGUAGE = """
from tilery.languages import Language
LANGUAGE = Language("acme", ("acme",), "acme", "pip install acme", "acme")
"""
KERNEL = """
from dataclasses import dataclass
import torch
from tilery.base.launch import Host
from tilery.core.kernel import Kernel
@dataclass(frozen=True)
class Config:
    pass
class Softmax(Kernel):
    archs, Config = ("cpu",), Config
    def default(self, call): return Config()
    def launches(self, call, config): return [Host(lambda x, y: y.copy_(torch.softmax(x, -1)), (call.x, call.y))]
softmax = Softmax()
"""
OP = """
import torch
from torch import Tensor
from tilery.core.op import op
from tilery.base.spec import Cost, Bucket, TensorSpec, case
@op(check=lambda call: None, outputs=lambda call: {"y": TensorSpec(*call.x)},
    cost=lambda call: Cost(1, call.x.nbytes, 0), bucket=lambda call: Bucket("", {}),
    inputs=lambda m, device, seed: {"x": torch.randn(m, device=device)},
    cases={"test": [case(m=3)]}, allowed={torch.float32: 1e-6}, kernels={}, baselines={})
def acme_negate(x: Tensor) -> Tensor:
    \"\"\"y = -x\"\"\"
    return -x
"""
ENTRY_POINTS = """
[tilery.languages]
acme = acme:LANGUAGE
[tilery.ops]
acme = acme.op
[tilery.kernels]
softmax/acme.fast = acme.kernel:softmax
"""


def test_a_package_adds_a_language_an_op_and_a_kernel(tmp_path):
    package, info = tmp_path / "acme", tmp_path / "acme-1.0.dist-info"
    for folder, files in ((package, {"__init__.py": LANGUAGE, "kernel.py": KERNEL, "op.py": OP}),
                          (info, {"METADATA": "Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n",
                                  "entry_points.txt": ENTRY_POINTS})):  # fmt: skip
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
    code = """
        import sys
        sys.path.insert(0, sys.argv[1])
        import torch, tilery
        x = torch.randn(3, 5)
        assert torch.equal(tilery.softmax(x, backend="acme.fast"), torch.softmax(x, -1))
        from tilery.core.op import REGISTRY
        assert REGISTRY["acme_negate"].torch_op is torch.ops.tilery.acme_negate
        assert list(REGISTRY["softmax"].kernels)[-1] == "acme.fast"
        print("added")
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.strip() == "added", done.stderr
