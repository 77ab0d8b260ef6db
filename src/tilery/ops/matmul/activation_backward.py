"""Contract of activation_backward, the gradient of what linear does to its sums."""

from typing import Any

import torch
from torch import Tensor

from tilery.base.errors import require
from tilery.base.spec import Bucket, Cost, TensorSpec, case
from tilery.core import inputs as draw
from tilery.core.call import Call
from tilery.core.op import op
from tilery.core.peers import Compiled, baselines
from tilery.ops.gated.activations import factor_and_slope
from tilery.ops.rows import contract as rows

ALLOWED = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}
_FLOPS = {"relu": 1, "gelu": 30, "gelu_tanh": 15, "silu": 10}  # of an element
_FORMS = {"gelu": "none", "gelu_tanh": "tanh", "silu": "silu"}  # as gated ops call them


def _check(call: Call) -> None:
    rows.check_rows("dy", call.dy, ALLOWED)
    rows.check_rows("z", call.z, ALLOWED)
    rows.check_like("dy", call.dy, "z", call.z)
    require(call.activation in _FLOPS, f"activation must be one of {', '.join(_FLOPS)}, got {call.activation!r}")


def _outputs(call: Call) -> dict[str, TensorSpec]:
    return {"dz": rows.like(call.z)}


def _cost(call: Call) -> Cost:
    return rows.cost_rows(call.z, flops=_FLOPS[call.activation], reads=2)


def _bucket(call: Call) -> Bucket:
    return rows.bucket_rows(call.z)


def _inputs(
    m: int, n: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none", batch: int = 0,
    activation: str = "silu", device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """`layout` and `special` are those of z."""
    g = draw.generator(seed, device)
    z = rows.draw(m, n, dtype, g, layout, special, batch)
    return {"dy": rows.draw(m, n, dtype, g, "contiguous", "none", batch), "z": z, "activation": activation}


def _torch(dy: Tensor, z: Tensor, activation: str) -> Tensor:
    """What autograd runs."""
    if activation == "relu":
        return torch.ops.aten.threshold_backward(dy, z, 0)
    if activation == "silu":
        return torch.ops.aten.silu_backward(dy, z)
    return torch.ops.aten.gelu_backward(dy, z, approximate=_FORMS[activation])


@op(
    check=_check, outputs=_outputs, cost=_cost, bucket=_bucket, inputs=_inputs, allowed=ALLOWED,
    kernels={
        "numba": "tilery.ops.matmul.numba.activation_backward:activation_backward",
        "triton": "tilery.ops.matmul.triton.activation_backward:activation_backward",
    },
    baselines=baselines(torch=_torch, compile=Compiled(_torch)),
    model_sizes=lambda model: [{"n": model.mlp_size}],
    cases={
        "test": [
            *(case(m=3, n=1000, dtype="fp32", activation=activation) for activation in _FLOPS),
            *(case(m=3, n=127, dtype="bf16", activation=activation) for activation in _FLOPS),
            *(case(m=5, n=1000, dtype="fp16", activation=activation) for activation in _FLOPS),
            case(m=9, n=1, dtype="fp32", activation="relu"),
            case(m=0, n=128, dtype="fp32"),  # nothing to launch
            case(m=4, n=0, dtype="bf16"),
            case(m=2, n=96, dtype="fp32", batch=3, activation="gelu_tanh"),
            case(m=5, n=256, dtype="fp16", layout="padded"),
            case(m=5, n=257, dtype="bf16", layout="misaligned", activation="gelu"),
            case(m=3, n=72, dtype="fp16", layout="far"),  # more than 2**31 elements from first to last
            *(case(m=3, n=200, dtype="fp32", special="nan", activation=activation) for activation in _FLOPS),
            *(case(m=3, n=200, dtype="fp16", special="-inf", activation=activation) for activation in _FLOPS),
        ],
        "bench": [case(m=m, n=14336, dtype="bf16", activation="gelu") for m in (16, 8192)],
        "bench_cpu": [case(m=2048, n=4096, dtype=dtype, activation="gelu") for dtype in ("fp32", "bf16")],
    },
)  # fmt: skip
def activation_backward(dy: Tensor, z: Tensor, activation: str) -> Tensor:
    """Gradient of linear's activation: dz = dy · act'(z) where y = act(z), 0 for relu where z ≤ 0; dy, z, dz [..., N].

    activation: relu, gelu, gelu_tanh or silu.
    """
    if activation == "relu":
        return torch.where(z <= 0, 0, dy)
    return dy * factor_and_slope(z, _FORMS[activation])[1]
