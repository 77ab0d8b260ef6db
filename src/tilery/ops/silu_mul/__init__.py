import torch.nn.functional as F
from torch import Tensor

from tilery.core.op import op
from tilery.core.peers import Compiled, baselines, load
from tilery.ops.silu_mul_backward import silu_mul_backward
from tilery.ops.silu_mul_packed_backward import silu_mul_packed_backward
from tilery.parts import gated, rows


def _torch(gate: Tensor, up: Tensor | None) -> Tensor:
    gate, up = gated.pair(gate, up)
    return F.silu(gate) * up


def _liger(gate: Tensor, up: Tensor | None) -> Tensor:
    ops = load("liger_kernel.ops")
    function = ops.LigerSiLUMulFunction if up is not None else ops.LigerFusedGateUpSiLUMulFunction
    return function.apply(gate, *([] if up is None else [up]))


def _tilegym(gate: Tensor, up: Tensor | None) -> Tensor:
    ops = load("tilegym.ops")
    return ops.silu_and_mul(gate) if up is None else ops.get_swiglu()(gate, up)


@op(
    check=gated.check, outputs=gated.outputs, cost=gated.cost, bucket=gated.bucket, inputs=gated.inputs,
    allowed=gated.ALLOWED, kernels=("numba", "triton", "cutile", "cuda"),
    baselines=baselines(torch=_torch, compile=Compiled(_torch), liger=_liger, tilegym=_tilegym),
    model_sizes=lambda model: [{"n": model.mlp_size}],
    cases={"test": [*rows.cases(), *gated.packed_cases()], **gated.bench_cases()},
    backward=gated.gradients(silu_mul_backward, silu_mul_packed_backward),
)  # fmt: skip
def silu_mul(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """SwiGLU's product: y = gate · sigmoid(gate) · up [..., N]; without up, gate is [..., 2N], gate and then up."""
    return gated.reference(gate, up, "silu")
