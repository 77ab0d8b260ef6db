"""Contracts of gelu_mul, gelu_mul_backward and gelu_mul_packed_backward."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilery.base.errors import require
from tilery.base.spec import Bucket
from tilery.core.op import op
from tilery.core.peers import Compiled, baselines, load
from tilery.ops.gated import contract
from tilery.ops.gated.activations import GELU
from tilery.ops.gated.call import GatedCall
from tilery.ops.rows import contract as rows


def _check_approximate(approximate: str) -> None:
    require(approximate in GELU, f"approximate must be one of {', '.join(GELU)}, got {approximate!r}")


# Backward


def _check_backward(call: GatedCall) -> None:
    contract.check_backward(call)
    _check_approximate(call.approximate)


def _backward_bucket(call: GatedCall) -> Bucket:
    return contract.backward_bucket(call, call.approximate)


def _backward_inputs(
    m: int, n: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none", batch: int = 0,
    approximate: str = "tanh", device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    drawn = contract.backward_inputs(m, n, dtype, layout, special, batch, device, seed)
    return {**drawn, "approximate": approximate}


def _packed_backward_inputs(
    m: int, n: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none", batch: int = 0,
    approximate: str = "tanh", device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    drawn = contract.packed_backward_inputs(m, n, dtype, layout, special, batch, device, seed)
    return {**drawn, "approximate": approximate}


@op(
    check=_check_backward, outputs=contract.backward_outputs, cost=contract.backward_cost, bucket=_backward_bucket,
    inputs=_backward_inputs, allowed=contract.ALLOWED, call_type=GatedCall,
    kernels={"numba": "numba_kernels:gated_backward", "triton": "triton_kernels:gated_backward"},
    baselines=baselines(torch=contract.backward_by_torch, compile=Compiled(contract.backward_by_torch)),
    model_sizes=lambda model: [{"n": model.mlp_size}],
    cases={"test": [*contract.backward_cases(), *contract.exact_cases()], **contract.backward_bench_cases()},
)  # fmt: skip
def gelu_mul_backward(dy: Tensor, gate: Tensor, up: Tensor, approximate: str = "tanh") -> tuple[Tensor, Tensor]:
    """Gradients of gelu_mul: dgate = dy · up · gelu'(gate), dup = dy · gelu(gate); all [..., N]."""
    return contract.backward_reference(dy, gate, up, approximate)


@op(
    check=_check_backward, outputs=contract.packed_backward_outputs, cost=contract.backward_cost,
    bucket=_backward_bucket, inputs=_packed_backward_inputs, allowed=contract.ALLOWED, call_type=GatedCall,
    kernels={"numba": "numba_kernels:gated_backward", "triton": "triton_kernels:gated_backward"},
    baselines=baselines(torch=contract.packed_backward_by_torch, compile=Compiled(contract.packed_backward_by_torch)),
    model_sizes=lambda model: [{"n": model.mlp_size}],
    cases={"test": [*contract.backward_cases(), *contract.exact_cases()], **contract.backward_bench_cases()},
)  # fmt: skip
def gelu_mul_packed_backward(dy: Tensor, x: Tensor, approximate: str = "tanh") -> Tensor:
    """Gradient of gelu_mul(x): dx = [dgate, dup] where x = [gate, up]; dy [..., N], x, dx [..., 2N]."""
    return torch.cat(contract.backward_reference(dy, *contract.split(x, None), approximate), -1)


# Forward


def _check(call: GatedCall) -> None:
    contract.check(call)
    _check_approximate(call.approximate)


def _bucket(call: GatedCall) -> Bucket:
    return contract.bucket(call, call.approximate)


def _inputs(
    m: int, n: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none", batch: int = 0,
    packed: bool = False, approximate: str = "tanh", device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    drawn = contract.inputs(m, n, dtype, layout, special, batch, packed, device, seed)
    return {**drawn, "approximate": approximate}


def _torch(gate: Tensor, up: Tensor | None, approximate: str) -> Tensor:
    gate, up = contract.split(gate, up)
    return F.gelu(gate, approximate=approximate) * up


def _liger(gate: Tensor, up: Tensor | None, approximate: str) -> Any:
    """Liger has the tanh form alone."""
    return load("liger_kernel.ops").LigerGELUMulFunction.apply(*contract.split(gate, up))


def _backward(call: GatedCall, grads: Any) -> dict[str, Any]:
    if call.up is None:
        return {"gate": gelu_mul_packed_backward(grads.y, call.gate, call.approximate)}
    dgate, dup = gelu_mul_backward(grads.y, call.gate, call.up, call.approximate)
    return {"gate": dgate, "up": dup}


@op(
    check=_check, outputs=contract.outputs, cost=contract.cost, bucket=_bucket, inputs=_inputs,
    allowed=contract.ALLOWED, call_type=GatedCall,
    kernels={"numba": "numba_kernels:gated", "triton": "triton_kernels:gated"},
    baselines=baselines(torch=_torch, compile=Compiled(_torch), liger=_liger),
    model_sizes=lambda model: [{"n": model.mlp_size}],
    cases={
        "test": [*rows.cases(), *contract.packed_cases(), *contract.exact_cases()],
        **contract.bench_cases(),
    },
    backward=_backward,
)  # fmt: skip
def gelu_mul(gate: Tensor, up: Tensor | None = None, approximate: str = "tanh") -> Tensor:
    """GEGLU's product: y = gelu(gate) · up [..., N]; without up, gate is [..., 2N]; approximate: tanh or none."""
    return contract.reference(gate, up, approximate)
