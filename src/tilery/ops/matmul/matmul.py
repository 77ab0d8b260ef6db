"""Contract of matmul."""

from typing import Any

import torch
from torch import Tensor

from tilery.base.errors import require
from tilery.base.spec import Bucket, Cost, TensorSpec, case, dtype_name
from tilery.core import inputs as draw
from tilery.core.op import op
from tilery.core.peers import baselines, load
from tilery.ops.matmul import contract
from tilery.ops.matmul.call import MatmulCall, layout
from tilery.ops.matmul.contract import ALLOWED, FAR

# Refusals that several cases declare: tensor cores round fp32, TMA wants rows on 16 bytes.
TF32 = {"gluon": "tf32", "tilelang": "tf32", "cuda.hopper": "tf32"}
TMA = {"gluon": "multiples of 16 bytes"}


def check(call: MatmulCall) -> None:
    a, b = call.a, call.b
    for name, x in (("a", a), ("b", b)):
        require(x.dtype in ALLOWED, f"{name} must be {', '.join(map(dtype_name, ALLOWED))}, got {dtype_name(x.dtype)}")
        require(len(x.shape) == 2, f"{name} must be a matrix, got shape {list(x.shape)}")
        require(
            x.stride(0) == 1 or x.stride(1) == 1 or x.shape[0] <= 1 or x.shape[1] <= 1,
            f"{name} must have stride 1 along one dimension, got strides {list(x.strides)}; call .contiguous() on it",
        )
    contract.check_same_dtype(a, b)
    require(
        a.shape[1] == b.shape[0],
        f"a [M, K] and b [K, N] must agree in K, got {list(a.shape)} and {list(b.shape)}",
    )
    contract.check_precision(call.precision, a.dtype)


def outputs(call: MatmulCall) -> dict[str, TensorSpec]:
    return {"c": TensorSpec.contiguous((call.m, call.n), call.a.dtype, call.a.device)}


def cost(call: MatmulCall) -> Cost:
    return contract.cost(call.m, call.n, call.k, call.a, call.b)


def _backward(call: Any, grads: Any) -> dict[str, Any]:
    found = {}
    if "a" in grads.needed:
        found["a"] = matmul(grads.c, call.b.t(), call.precision)
    if "b" in grads.needed:
        found["b"] = matmul(call.a.t(), grads.c, call.precision)
    return found


def bucket(call: MatmulCall) -> Bucket:
    exact = f"n={call.n},k={call.k},{dtype_name(call.a.dtype)},{layout(call.a)}{layout(call.b)}"
    return Bucket(exact=exact + (",tf32" if call.precision == "tf32" else ""), scaled={"m": call.m})


def inputs(
    m: int, n: int, k: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none",
    layout_b: str = "transposed", precision: str = "ieee",
    device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """`layout` is a's; b is w.T of a weight w [N, K] unless said otherwise."""
    g = draw.generator(seed, device)
    a = draw.matrix(m, k, dtype, g, layout, special)
    b = draw.matrix(k, n, dtype, g, layout_b)
    return {"a": a, "b": b, "precision": precision}


def _torch(a: Tensor, b: Tensor, precision: str) -> Tensor:
    return torch.matmul(a, b)


@op(
    check=check, outputs=outputs, cost=cost, bucket=bucket, inputs=inputs, allowed=contract.allowed,
    call_type=MatmulCall,
    first=contract.gemv_first,
    kernels={
        "numba": "tilery.ops.matmul.numba.gemm:gemm",
        "cuda.hopper": "tilery.ops.matmul.cuda.hopper:gemm",
        "triton": "tilery.ops.matmul.triton.gemm:gemm",
        "cuda.gemv": "tilery.ops.matmul.cuda.gemv:gemv",
        "gluon": "gluon_kernels:matmul",
        "tilelang": "tilelang_kernels:matmul",
        "cutile": "tilery.ops.matmul.cutile.gemm:matmul",
        "cuda": "tilery.ops.matmul.cuda.cp_async:matmul",
        "cupy": "cupy_kernels:matmul",
        "numba_cuda": "numba_cuda_kernels:matmul",
        "vendor": "vendor_kernels:matmul",
    },
    baselines=baselines(
        torch=contract.peer(_torch), tilegym=lambda a, b, precision: load("tilegym.ops").matmul(a, b)
    ),
    model_sizes=lambda model: [{"n": layer.n, "k": layer.k} for layer in model.linears()],
    backward=_backward,
    cases=contract.with_gemv(("transposed",), "transposed", {
        "test": [
            case(m=128, n=256, k=192, dtype="fp16"),
            case(m=128, n=256, k=192, dtype="bf16"),
            case(m=128, n=256, k=192, dtype="bf16", layout_b="contiguous"),
            case(m=64, n=64, k=64, dtype="fp32", refused_by=TF32),
            case(m=65, n=33, k=97, dtype="fp32", refused_by=TF32),  # odd tails on every side
            case(m=65, n=33, k=97, dtype="bf16", layout_b="contiguous", refused_by=TMA),
            case(m=100, n=136, k=72, dtype="fp16"),  # tails that 16-byte loads can bear
            case(m=300, n=200, k=136, dtype="bf16", layout="transposed", layout_b="contiguous", refused_by=TMA),
            case(m=1, n=128, k=256, dtype="bf16"),  # one row
            case({"gluon": "multiple of 8"}, m=5, n=67, k=1032, dtype="fp16"),  # a few rows
            case(m=8, n=40, k=520, dtype="bf16"),
            case({"gluon": "multiple of 8"}, m=1, n=33, k=64, dtype="fp16"),  # one that does not end on 16 bytes
            case(m=17, n=40, k=1, dtype="fp16", layout_b="misaligned", refused_by=TMA),  # nor start there
            case(m=1, n=1, k=1, dtype="fp32", refused_by=TF32),
            case(m=0, n=64, k=64, dtype="fp16"),  # nothing to launch
            case(m=64, n=0, k=64, dtype="fp16"),
            case(m=40, n=24, k=0, dtype="fp16"),  # a sum of nothing is zero
            case(m=40, n=24, k=0, dtype="fp32", refused_by=TF32),
            case(m=72, n=64, k=64, dtype="bf16", layout="transposed"),
            case(m=70, n=64, k=64, dtype="fp16", layout="transposed", layout_b="contiguous", refused_by=TMA),
            case(m=33, n=64, k=64, dtype="fp16", layout="padded"),
            case(m=33, n=40, k=65, dtype="bf16", layout="misaligned", refused_by=TMA),
            case(FAR, m=3, n=32, k=64, dtype="fp16", layout="far"),  # more than 2**31 elements
            case(m=32, n=64, k=130, dtype="fp16", layout_b="far", refused_by=TMA | FAR),
            case(m=32, n=64, k=64, dtype="bf16", special="nan"),
            case(m=32, n=64, k=64, dtype="fp32", special="inf", refused_by=TF32),
            case(m=32, n=64, k=64, dtype="fp16", special="inf"),
            case(m=64, n=72, k=96, dtype="fp32", precision="tf32", refused_by=TF32),
            case(m=33, n=65, k=97, dtype="fp32", precision="tf32", refused_by=TF32),
        ],
        "bench": [case(m=m, n=n, k=4096, dtype="bf16") for m, n in ((16, 4096), (4096, 4096), (4096, 14336))],
        "bench_cpu": [case(m=1024, n=1024, k=1024, dtype="fp32"), case(m=1024, n=1024, k=1024, dtype="bf16")],
    }),
)  # fmt: skip
def matmul(a: Tensor, b: Tensor, precision: str = "ieee") -> Tensor:
    """Matrix product: c = a · b; a [M, K], b [K, N], c [M, N]; each of a and b row- or column-major (b may be w.T).

    precision tf32 lets tensor cores round fp32 to 11 bits.
    """
    return a @ b
