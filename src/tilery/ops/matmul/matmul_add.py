"""Contract of matmul_add."""

from typing import Any

import torch
from torch import Tensor

from tilery.base.errors import require
from tilery.base.spec import Cost, TensorSpec, case, dtype_name
from tilery.core import inputs as draw
from tilery.core.op import op
from tilery.core.peers import Compiled, baselines
from tilery.ops.matmul import contract
from tilery.ops.matmul import matmul as plain
from tilery.ops.matmul.call import MatmulAddCall
from tilery.ops.matmul.contract import ROUNDS, TF32


def check(call: MatmulAddCall) -> None:
    plain.check(call)
    dtype, c = call.a.dtype, call.addend
    shape, came = (call.m, call.n), f"{dtype_name(c.dtype)}{list(c.shape)}"
    fits = c.shape == shape and c.dtype == dtype
    require(fits, f"c must be {dtype_name(dtype)}{list(shape)} as a · b is, got {came}")
    require(
        1 in c.strides or any(size <= 1 for size in shape),
        f"c must have stride 1 along one dimension, got strides {list(c.strides)}; call .contiguous() on it",
    )


def outputs(call: MatmulAddCall) -> dict[str, TensorSpec]:
    return {"y": plain.outputs(call)["c"]}


def cost(call: MatmulAddCall) -> Cost:
    return contract.cost(call.m, call.n, call.k, call.a, call.b, call.addend, epilogue=3)


def _backward(call: Any, grads: Any) -> dict[str, Any]:
    """alpha is multiplied where sums are rounded. Of a and b, given as c, only the shape counts: beta is 0."""
    found, dy, once = {}, grads.y, (call.alpha, 0.0, call.precision)
    if "a" in grads.needed:
        found["a"] = matmul_add(dy, call.b.t(), call.a, *once)
    if "b" in grads.needed:
        found["b"] = matmul_add(call.a.t(), dy, call.b, *once)
    if "c" in grads.needed:
        found["c"] = dy if call.beta == 1 else dy * call.beta
    return found


def inputs(
    m: int, n: int, k: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none",
    layout_b: str = "transposed", layout_c: str = "contiguous", special_c: str = "none",
    alpha: float = 1.0, beta: float = 1.0, precision: str = "ieee", device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """`layout` and `special` are a's; b is w.T of a weight w [N, K] unless said otherwise."""
    found = plain.inputs(m, n, k, dtype, layout, special, layout_b, precision, device, seed)
    c = draw.matrix(m, n, dtype, draw.generator(seed + 1, device), layout_c, special_c)
    c *= max(k, 1) ** 0.5  # as large as the products, so that neither hides the other
    return found | {"c": c, "alpha": alpha, "beta": beta}


def _torch(a: Tensor, b: Tensor, c: Tensor, alpha: float, beta: float, precision: str) -> Tensor:
    return torch.addmm(c, a, b, alpha=alpha, beta=beta)


NO_K = ROUNDS | {"cuda.hopper": "K must be"}


@op(
    check=check, outputs=outputs, cost=cost, bucket=plain.bucket, inputs=inputs, allowed=contract.allowed,
    call_type=MatmulAddCall, runtime=("alpha", "beta"),
    first=contract.gemv_first,
    kernels={
        "numba": "tilery.ops.matmul.numba.gemm:gemm",
        "cuda.hopper": "tilery.ops.matmul.cuda.hopper:gemm",
        "triton": "tilery.ops.matmul.triton.gemm:gemm",
        "cuda.gemv": "tilery.ops.matmul.cuda.gemv:gemv",
        "vendor": "vendor_kernels:matmul_add",
    },
    baselines=baselines(torch=contract.peer(_torch), compile=contract.peer(Compiled(_torch))),
    model_sizes=lambda model: [{"n": layer.n, "k": layer.k} for layer in model.linears()],
    backward=_backward,
    cases=contract.with_gemv(("transposed",), "transposed", {
        "test": [
            case(m=40, n=72, k=80, dtype="fp32", alpha=0.5, beta=-2.0, refused_by=TF32),
            case(ROUNDS, m=40, n=72, k=80, dtype="fp16", alpha=0.5, beta=-2.0),
            case(ROUNDS, m=40, n=72, k=80, dtype="bf16", alpha=0.5, beta=-2.0),
            case(ROUNDS, m=130, n=136, k=72, dtype="fp16", beta=0.5),  # several tiles each way
            case(m=65, n=33, k=97, dtype="fp32", layout_b="contiguous", alpha=-1.0, refused_by=TF32),  # odd tails
            case(ROUNDS, m=65, n=33, k=97, dtype="bf16", layout="transposed"),
            case(ROUNDS, m=40, n=56, k=64, dtype="bf16", layout_c="transposed", beta=0.25),
            case(m=40, n=56, k=64, dtype="fp32", layout_c="transposed", beta=0.25, refused_by=TF32),
            case(ROUNDS, m=1, n=128, k=256, dtype="bf16", beta=0.5),  # one row
            case(ROUNDS, m=4, n=67, k=520, dtype="fp16", alpha=-0.5, layout_c="transposed"),  # a few
            case(m=3, n=300, k=64, dtype="fp32", alpha=2.0, layout_c="transposed", refused_by=TF32),
            case(m=9, n=1, k=1, dtype="fp32", refused_by=TF32),
            case(ROUNDS, m=0, n=64, k=64, dtype="fp16"),  # nothing to launch
            case(ROUNDS, m=64, n=0, k=64, dtype="fp16"),
            case(m=40, n=24, k=0, dtype="fp16", beta=2.0, refused_by=NO_K),  # c alone
            case(ROUNDS, m=33, n=64, k=64, dtype="fp16", layout="padded", layout_c="padded"),
            case(ROUNDS, m=33, n=40, k=65, dtype="bf16", layout="misaligned", layout_c="misaligned"),
            case(ROUNDS, m=3, n=32, k=64, dtype="fp16", layout_c="far"),  # more than 2**31 elements
            case(ROUNDS, m=3, n=32, k=64, dtype="fp16", layout="far"),
            case(m=32, n=64, k=64, dtype="fp32", special="nan", refused_by=TF32),
            case(ROUNDS, m=32, n=64, k=64, dtype="fp16", special="inf", alpha=-1.0),
            case(m=32, n=64, k=64, dtype="fp32", special_c="nan", refused_by=TF32),
            case(m=32, n=64, k=64, dtype="fp32", special_c="nan", beta=0.0, refused_by=TF32),  # c is not read
            case(ROUNDS, m=5, n=64, k=64, dtype="fp16", special_c="inf", beta=0.0),
            case(m=64, n=72, k=96, dtype="fp32", precision="tf32", alpha=0.5, refused_by=TF32),
        ],
        "bench": [case(m=m, n=4096, k=4096, dtype="bf16") for m in (16, 4096)],
        "bench_cpu": [case(m=1024, n=1024, k=1024, dtype="fp32"), case(m=1024, n=1024, k=1024, dtype="bf16")],
    }),
)  # fmt: skip
def matmul_add(
    a: Tensor, b: Tensor, c: Tensor, alpha: float = 1.0, beta: float = 1.0, precision: str = "ieee"
) -> Tensor:
    """y = alpha · a b + beta · c, rounded once; a [M, K], b [K, N], c, y [M, N]. Where beta is 0, c is not read.

    Each of a, b and c is row- or column-major; precision as for linear.
    """
    y = alpha * (a @ b)
    return y if beta == 0 else y + beta * c
