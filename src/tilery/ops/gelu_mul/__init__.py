from typing import Any

import torch.nn.functional as F
from torch import Tensor

from tilery.core.op import op
from tilery.core.peers import Compiled, baselines, load
from tilery.ops.gelu_mul_backward import gelu_mul_backward
from tilery.ops.gelu_mul_packed_backward import gelu_mul_packed_backward
from tilery.parts import gated, rows


def inputs(
    m: int, n: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none", batch: int = 0,
    packed: bool = False, approximate: str = "tanh", device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    drawn = gated.inputs(m, n, dtype, layout, special, batch, packed, device, seed)
    return {**drawn, "approximate": approximate}


def _torch(gate: Tensor, up: Tensor | None, approximate: str) -> Tensor:
    gate, up = gated.pair(gate, up)
    return F.gelu(gate, approximate=approximate) * up


def _liger(gate: Tensor, up: Tensor | None, approximate: str) -> Tensor:
    """Of the two forms it has the tanh."""
    return load("liger_kernel.ops").LigerGELUMulFunction.apply(*gated.pair(gate, up))


@op(
    check=gated.check, outputs=gated.outputs, cost=gated.cost, bucket=gated.bucket, inputs=inputs,
    allowed=gated.ALLOWED, kernels=("numba", "triton"),
    baselines=baselines(torch=_torch, compile=Compiled(_torch), liger=_liger),
    model_sizes=lambda model: [{"n": model.mlp_size}],
    cases={
        "test": [*rows.cases(), *gated.packed_cases(), *gated.exact_cases()],
        **gated.bench_cases(),
    },
    backward=gated.gradients(gelu_mul_backward, gelu_mul_packed_backward),
)  # fmt: skip
def gelu_mul(gate: Tensor, up: Tensor | None = None, approximate: str = "tanh") -> Tensor:
    """GEGLU's product: y = gelu(gate) · up [..., N]; without up, gate is [..., 2N]; approximate: tanh or none."""
    return gated.reference(gate, up, approximate)
