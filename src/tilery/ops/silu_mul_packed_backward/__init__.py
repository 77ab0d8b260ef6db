import torch
from torch import Tensor

from tilery.core.op import op
from tilery.core.peers import Compiled, baselines, load
from tilery.parts import gated


@op(
    check=gated.check_packed_backward, outputs=gated.outputs_packed_backward, cost=gated.cost_backward,
    bucket=gated.bucket_backward, inputs=gated.inputs_packed_backward, allowed=gated.ALLOWED,
    kernels=("numba", "triton"),
    baselines=baselines(
        torch=gated.torch_packed_backward, compile=Compiled(gated.torch_packed_backward),
        liger=lambda dy, x: load("liger_kernel.ops.swiglu").swiglu_fused_gate_up_backward(x, dy),
    ),
    model_sizes=lambda model: [{"n": model.mlp_size}],
    cases={"test": gated.backward_cases(), **gated.backward_bench_cases()},
)  # fmt: skip
def silu_mul_packed_backward(dy: Tensor, x: Tensor) -> Tensor:
    """Gradient of silu_mul(x): dx = [dgate, dup] where x = [gate, up]; dy [..., N], x, dx [..., 2N]."""
    return torch.cat(gated.reference_backward(dy, *gated.halves(x), "silu"), -1)
