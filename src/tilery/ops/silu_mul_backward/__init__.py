from torch import Tensor

from tilery.core.op import op
from tilery.core.peers import Compiled, baselines
from tilery.parts import gated


@op(
    check=gated.check_backward, outputs=gated.outputs_backward, cost=gated.cost_backward,
    bucket=gated.bucket_backward, inputs=gated.inputs_backward, allowed=gated.ALLOWED, kernels=("numba", "triton"),
    baselines=baselines(torch=gated.torch_backward, compile=Compiled(gated.torch_backward)),
    model_sizes=lambda model: [{"n": model.mlp_size}],
    cases={"test": gated.backward_cases(), **gated.backward_bench_cases()},
)  # fmt: skip
def silu_mul_backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of silu_mul: dgate = dy · up · silu'(gate), dup = dy · silu(gate); all [..., N]."""
    return gated.reference_backward(dy, gate, up, "silu")
