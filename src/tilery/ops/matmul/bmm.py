"""Contract of bmm."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tilery.base.errors import require
from tilery.base.spec import Bucket, Cost, TensorSpec, case, dtype_name
from tilery.core import inputs as draw
from tilery.core.call import Call
from tilery.core.op import op
from tilery.core.peers import Compiled, baselines
from tilery.ops.matmul import contract
from tilery.ops.matmul.call import BmmCall, layout
from tilery.ops.matmul.contract import TF32

if TYPE_CHECKING:
    from tilery.models.model import Model


def check(call: Call) -> None:
    a, b = call.a, call.b
    contract.check_operand("a", a, "[B, M, K]")
    contract.check_operand("b", b, "[B, K, N]")
    contract.check_same_dtype(a, b)
    require(
        a.shape[0] == b.shape[0] and a.shape[2] == b.shape[1],
        f"a [B, M, K] and b [B, K, N] must agree in B and K, got {list(a.shape)} and {list(b.shape)}",
    )


def outputs(call: Call) -> dict[str, TensorSpec]:
    (count, m, _), n = call.a.shape, call.b.shape[2]
    return {"c": TensorSpec.contiguous((count, m, n), call.a.dtype, call.a.device)}


def cost(call: Call) -> Cost:
    (count, m, k), n = call.a.shape, call.b.shape[2]
    reads, writes = call.a.nbytes + call.b.nbytes, count * m * n * call.a.dtype.itemsize
    return Cost(flops=2 * count * m * n * k, reads=reads, writes=writes)


def bucket(call: Call) -> Bucket:
    (count, m, k), n = call.a.shape, call.b.shape[2]
    exact = f"n={n},k={k},{dtype_name(call.a.dtype)},{layout(call.a)}{layout(call.b)}"
    return Bucket(exact=exact, scaled={"m": m, "batch": count})


def _backward(call: Call, grads: Any) -> dict[str, Any]:
    found = {}
    if "a" in grads.needed:
        found["a"] = bmm(grads.c, call.b.transpose(1, 2))
    if "b" in grads.needed:
        found["b"] = bmm(call.a.transpose(1, 2), grads.c)
    return found


def inputs(
    batch: int, m: int, n: int, k: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none",
    layout_b: str = "contiguous", device: str = "cuda", seed: int = 0,
) -> dict[str, Tensor]:  # fmt: skip
    """`layout` is a's, `layout_b` that of b."""
    g = draw.generator(seed, device)
    return {
        "a": contract.draw(batch, m, k, dtype, g, layout, special),
        "b": contract.draw(batch, k, n, dtype, g, layout_b),
    }


def model_sizes(model: "Model") -> list[dict[str, int]]:
    """Multi-head latent attention takes its queries into the latent, head by head, and its values out of it."""
    if not model.kv_lora_rank:
        return []
    latent, nope, _, value = model.mla_sizes()
    heads = model.query_heads
    return [{"batch": heads, "n": latent, "k": nope}, {"batch": heads, "n": value, "k": latent}]


@op(
    check=check, outputs=outputs, cost=cost, bucket=bucket, inputs=inputs,
    allowed=lambda call: contract.allowed_of_sums(call.a.dtype, call.a.shape[2]),
    call_type=BmmCall,
    kernels={
        "numba": "tilery.ops.matmul.numba.batched:bmm",
        "cuda.hopper": "tilery.ops.matmul.cuda.hopper:gemm",
        "triton": "tilery.ops.matmul.triton.batched:bmm",
        "cuda.gemv": "tilery.ops.matmul.cuda.gemv:gemv",
        "cutile": "tilery.ops.matmul.cutile.batched:bmm",
        "vendor": "vendor_kernels:bmm",
    },
    baselines=baselines(torch=torch.bmm, compile=Compiled(torch.bmm)), model_sizes=model_sizes,
    backward=_backward,
    cases=contract.with_gemv(("transposed",), "contiguous", {
        "test": [
            case(batch=2, m=128, n=136, k=72, dtype="fp16"),
            case(batch=3, m=65, n=33, k=97, dtype="fp32", refused_by=TF32),  # odd tails on every side
            case(batch=2, m=128, n=136, k=72, dtype="bf16"),
            case(batch=2, m=65, n=33, k=97, dtype="bf16", layout_b="transposed"),
            case(batch=3, m=896, n=64, k=8, dtype="bf16"),  # tiles of 128 rows that do not pair off
            case(batch=5, m=1, n=40, k=64, dtype="bf16", layout_b="transposed"),  # one row each
            case(batch=3, m=7, n=35, k=520, dtype="fp16", layout_b="transposed"),  # a few
            case(batch=1, m=20, n=24, k=64, dtype="fp16"),
            case(batch=1, m=1, n=33, k=64, dtype="fp16"),  # a single row that does not end on 16 bytes
            case(batch=2, m=1, n=1, k=1, dtype="fp32", refused_by=TF32),
            case(batch=0, m=16, n=16, k=16, dtype="fp16"),  # nothing to launch
            case(batch=2, m=0, n=16, k=16, dtype="fp32", refused_by=TF32),
            case(batch=2, m=16, n=0, k=16, dtype="fp16"),
            case(batch=2, m=20, n=24, k=0, dtype="fp32", refused_by=TF32),  # a sum of nothing is zero
            case(batch=2, m=40, n=48, k=64, dtype="fp16", layout="transposed", layout_b="transposed"),
            case(batch=2, m=33, n=48, k=64, dtype="fp16", layout="padded", layout_b="padded"),
            case(batch=2, m=33, n=40, k=65, dtype="bf16", layout="misaligned", layout_b="misaligned"),
            case(batch=2, m=3, n=32, k=64, dtype="fp16", layout="far"),  # more than 2**31 elements
            case(batch=3, m=20, n=32, k=34, dtype="fp16", layout_b="far"),
            case(batch=2, m=32, n=40, k=64, dtype="fp32", special="nan", refused_by=TF32),
            case(batch=2, m=32, n=40, k=64, dtype="fp16", special="inf"),
        ],
        "bench": [
            *(case(batch=128, m=m, n=512, k=128, dtype="bf16") for m in (16, 256)),  # DeepSeek-V3's queries
            case(batch=16, m=2048, n=2048, k=128, dtype="bf16", layout_b="transposed"),
            case(batch=8, m=2048, n=2048, k=2048, dtype="bf16"),
        ],
        "bench_cpu": [
            case(batch=8, m=256, n=256, k=256, dtype="fp32"),
            case(batch=32, m=4, n=512, k=128, dtype="bf16"),
        ],
    }),
)  # fmt: skip
def bmm(a: Tensor, b: Tensor) -> Tensor:
    """Matrix products: c[i] = a[i] · b[i]; a [B, M, K], b [B, K, N], c [B, M, N]; layouts as matmul's, B anywhere."""
    return torch.bmm(a, b)
