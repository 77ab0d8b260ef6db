"""Contract of linear_silu_mul."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilery.base.errors import require
from tilery.base.spec import Cost, case
from tilery.core import inputs as draw
from tilery.core.op import op
from tilery.core.peers import Compiled, baselines
from tilery.ops.gated.silu_mul import silu_mul_packed_backward
from tilery.ops.matmul import contract
from tilery.ops.matmul import linear as plain
from tilery.ops.matmul.call import LinearSiluMulCall
from tilery.ops.matmul.contract import TF32
from tilery.ops.matmul.matmul import matmul
from tilery.ops.rows import contract as rows


def check(call: LinearSiluMulCall) -> None:
    plain.check_operands(call)
    shape = list(call.weight.shape)
    require(shape[0] % 2 == 0, f"weight must be [2N, K], the rows of gate and then those of up, got {shape}")


def cost(call: LinearSiluMulCall) -> Cost:
    return contract.cost(call.m, call.n, 2 * call.k, call.x, call.weight, epilogue=6)


def inputs(
    m: int, n: int, k: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none", batch: int = 0,
    layout_b: str = "contiguous", precision: str = "ieee", device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """`n` columns of the output; `layout` is x's, `layout_b` the weight's; gate and up are about normal."""
    g = draw.generator(seed, device)
    x, weight = rows.draw(m, k, dtype, g, layout, special, batch), draw.matrix(2 * n, k, dtype, g, layout_b)
    weight *= max(k, 1) ** -0.5
    return {"x": x, "weight": weight, "precision": precision}


def _backward(call: Any, grads: Any) -> dict[str, Any]:
    """Gate and up are computed again: the forward stores neither."""
    both = plain.linear(call.x, call.weight, precision=call.precision)
    dboth = silu_mul_packed_backward(grads.y, both).reshape(call.m, call.weight.shape[0])
    found = {}
    if "x" in grads.needed:
        found["x"] = matmul(dboth, call.weight, call.precision).view(call.x.shape)
    if "weight" in grads.needed:
        found["weight"] = matmul(dboth.t(), call.x.reshape(call.m, call.k), call.precision)
    return found


def allowed(call: LinearSiluMulCall) -> dict[torch.dtype, float]:
    """A product of two sums has the error of both."""
    if call.precision == "tf32":
        return {dtype: 3 * most for dtype, most in contract.ALLOWED_TF32.items()}
    return contract.allowed_of_sums(call.a.dtype, call.k)


def _torch(x: Tensor, weight: Tensor, precision: str) -> Tensor:
    gate, up = F.linear(x, weight).chunk(2, -1)
    return F.silu(gate) * up


@op(
    check=check, outputs=plain.outputs, cost=cost, bucket=plain.bucket, inputs=inputs, allowed=allowed,
    call_type=LinearSiluMulCall,
    first=contract.gemv_first,
    kernels={
        "numba": "tilery.ops.matmul.numba.gemm:gemm",
        "cuda.hopper": "tilery.ops.matmul.cuda.hopper:gated_gemm",
        "triton": "tilery.ops.matmul.triton.gemm:gemm",
        "cuda.gemv": "tilery.ops.matmul.cuda.gemv:gemv",
    },
    baselines=baselines(torch=contract.peer(_torch), compile=contract.peer(Compiled(_torch))),
    model_sizes=lambda model: [{"n": model.mlp_size, "k": model.hidden_size}],
    backward=_backward,
    cases=contract.with_gemv(("contiguous", "padded", "far"), "contiguous", {
        "test": [
            case(m=40, n=72, k=80, dtype="fp32", refused_by=TF32),
            case(m=40, n=72, k=80, dtype="fp16"),
            case(m=40, n=72, k=80, dtype="bf16"),
            case(m=130, n=136, k=72, dtype="fp16"),  # several tiles each way
            case(m=65, n=33, k=97, dtype="fp32", refused_by=TF32),  # odd tails; up starts in the middle of a tile
            case(m=65, n=33, k=97, dtype="bf16"),
            case(m=1, n=128, k=256, dtype="bf16"),  # one row
            case(m=3, n=67, k=1032, dtype="fp16"),  # a few
            case(m=3, n=300, k=64, dtype="fp32", refused_by=TF32),
            case(m=1, n=1, k=1, dtype="fp32", refused_by=TF32),
            case(m=0, n=64, k=64, dtype="fp16"),  # nothing to launch
            case(m=64, n=0, k=64, dtype="fp16"),
            case(m=40, n=24, k=0, dtype="fp16"),  # a product of sums of nothing is zero
            case(m=5, n=64, k=64, dtype="fp32", batch=3, refused_by=TF32),  # [batch, m, k]
            case(m=40, n=64, k=64, dtype="fp32", layout_b="transposed", refused_by=TF32),
            case(m=33, n=64, k=64, dtype="fp16", layout="padded"),
            case(m=33, n=40, k=65, dtype="bf16", layout="misaligned", layout_b="misaligned"),
            case(m=3, n=32, k=64, dtype="fp16", layout="far"),  # more than 2**31 elements
            case(m=17, n=16, k=64, dtype="fp16", layout_b="far"),
            case(m=32, n=64, k=64, dtype="fp32", special="nan", refused_by=TF32),
            case(m=32, n=64, k=64, dtype="fp16", special="inf"),
            case(m=64, n=72, k=96, dtype="fp32", precision="tf32", refused_by=TF32),
        ],
        "bench": [case(m=m, n=14336, k=4096, dtype="bf16") for m in (16, 4096)],
        "bench_cpu": [case(m=512, n=1024, k=1024, dtype="fp32"), case(m=512, n=1024, k=1024, dtype="bf16")],
    }),
)  # fmt: skip
def linear_silu_mul(x: Tensor, weight: Tensor, precision: str = "ieee") -> Tensor:
    """SwiGLU's first half: y = silu(x · gateᵀ) · (x · upᵀ), neither stored; x [..., K], weight [2N, K]: gate, then up.

    y [..., N]; precision as for linear.
    """
    gate, up = F.linear(x, weight).chunk(2, -1)
    return F.silu(gate) * up
