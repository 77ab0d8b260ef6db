from typing import Any

import torch
from torch import Tensor

from tilery.core.op import op
from tilery.core.peers import Compiled, baselines
from tilery.parts import gated


def inputs(
    m: int, n: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none", batch: int = 0,
    approximate: str = "tanh", device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    drawn = gated.inputs_packed_backward(m, n, dtype, layout, special, batch, device, seed)
    return {**drawn, "approximate": approximate}


@op(
    check=gated.check_packed_backward, outputs=gated.outputs_packed_backward, cost=gated.cost_backward,
    bucket=gated.bucket_backward, inputs=inputs, allowed=gated.ALLOWED, kernels=("numba", "triton"),
    baselines=baselines(torch=gated.torch_packed_backward, compile=Compiled(gated.torch_packed_backward)),
    model_sizes=lambda model: [{"n": model.mlp_size}],
    cases={
        "test": [*gated.backward_cases(), *gated.exact_cases()],
        **gated.backward_bench_cases(),
    },
)  # fmt: skip
def gelu_mul_packed_backward(dy: Tensor, x: Tensor, approximate: str = "tanh") -> Tensor:
    """Gradient of gelu_mul(x): dx = [dgate, dup] where x = [gate, up]; dy [..., N], x, dx [..., 2N]."""
    return torch.cat(gated.reference_backward(dy, *gated.halves(x), approximate), -1)
