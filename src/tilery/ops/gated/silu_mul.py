"""Contracts of silu_mul, silu_mul_backward and silu_mul_packed_backward."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilery.core.op import op
from tilery.core.peers import Compiled, baselines, load
from tilery.ops.gated import contract
from tilery.ops.gated.call import GatedCall
from tilery.ops.rows import contract as rows


@op(
    check=contract.check_backward, outputs=contract.backward_outputs, cost=contract.backward_cost,
    bucket=contract.backward_bucket, inputs=contract.backward_inputs, allowed=contract.ALLOWED, call_type=GatedCall,
    kernels={"numba": "numba_kernels:gated_backward", "triton": "triton_kernels:gated_backward"},
    baselines=baselines(torch=contract.backward_by_torch, compile=Compiled(contract.backward_by_torch)),
    model_sizes=lambda model: [{"n": model.mlp_size}],
    cases={"test": contract.backward_cases(), **contract.backward_bench_cases()},
)  # fmt: skip
def silu_mul_backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of silu_mul: dgate = dy · up · silu'(gate), dup = dy · silu(gate); all [..., N]."""
    return contract.backward_reference(dy, gate, up, "silu")


@op(
    check=contract.check_backward, outputs=contract.packed_backward_outputs, cost=contract.backward_cost,
    bucket=contract.backward_bucket, inputs=contract.packed_backward_inputs, allowed=contract.ALLOWED,
    call_type=GatedCall,
    kernels={"numba": "numba_kernels:gated_backward", "triton": "triton_kernels:gated_backward"},
    baselines=baselines(
        torch=contract.packed_backward_by_torch, compile=Compiled(contract.packed_backward_by_torch),
        liger=lambda dy, x: load("liger_kernel.ops.swiglu").swiglu_fused_gate_up_backward(x, dy),
    ),
    model_sizes=lambda model: [{"n": model.mlp_size}],
    cases={"test": contract.backward_cases(), **contract.backward_bench_cases()},
)  # fmt: skip
def silu_mul_packed_backward(dy: Tensor, x: Tensor) -> Tensor:
    """Gradient of silu_mul(x): dx = [dgate, dup] where x = [gate, up]; dy [..., N], x, dx [..., 2N]."""
    return torch.cat(contract.backward_reference(dy, *contract.split(x, None), "silu"), -1)


def _torch(gate: Tensor, up: Tensor | None) -> Tensor:
    gate, up = contract.split(gate, up)
    return F.silu(gate) * up


def _liger(gate: Tensor, up: Tensor | None) -> Any:
    ops = load("liger_kernel.ops")
    function = ops.LigerSiLUMulFunction if up is not None else ops.LigerFusedGateUpSiLUMulFunction
    return function.apply(gate, *([] if up is None else [up]))


def _tilegym(gate: Tensor, up: Tensor | None) -> Any:
    ops = load("tilegym.ops")
    return ops.silu_and_mul(gate) if up is None else ops.get_swiglu()(gate, up)


def _backward(call: GatedCall, grads: Any) -> dict[str, Any]:
    if call.up is None:
        return {"gate": silu_mul_packed_backward(grads.y, call.gate)}
    dgate, dup = silu_mul_backward(grads.y, call.gate, call.up)
    return {"gate": dgate, "up": dup}


@op(
    check=contract.check, outputs=contract.outputs, cost=contract.cost, bucket=contract.bucket, inputs=contract.inputs,
    allowed=contract.ALLOWED, call_type=GatedCall,
    kernels={
        "numba": "numba_kernels:gated", "triton": "triton_kernels:gated", "cutile": "cutile_kernels:silu_mul",
        "cuda": "cuda_kernels:silu_mul",
    },
    baselines=baselines(torch=_torch, compile=Compiled(_torch), liger=_liger, tilegym=_tilegym),
    model_sizes=lambda model: [{"n": model.mlp_size}],
    cases={"test": [*rows.cases(), *contract.packed_cases()], **contract.bench_cases()},
    backward=_backward,
)  # fmt: skip
def silu_mul(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """SwiGLU's product: y = gate · sigmoid(gate) · up [..., N]; without up, gate is [..., 2N], gate and then up."""
    return contract.reference(gate, up, "silu")
