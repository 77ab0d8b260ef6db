"""Contract of linear."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from tilery.base.errors import require
from tilery.base.spec import Bucket, Cost, TensorSpec, case, dtype_name
from tilery.core import inputs as draw
from tilery.core.op import op
from tilery.core.peers import Compiled, baselines
from tilery.ops.matmul import contract
from tilery.ops.matmul.activation_backward import activation_backward
from tilery.ops.matmul.call import LinearCall
from tilery.ops.matmul.contract import ACTIVATIONS, ALLOWED, FAR, ROUNDS, TF32
from tilery.ops.matmul.matmul import matmul
from tilery.ops.rows import contract as rows

_FLOPS = {"none": 0, "relu": 1, "gelu": 25, "gelu_tanh": 9, "silu": 5}  # of an element


def check_operands(call: LinearCall) -> None:
    """What linear and linear_silu_mul ask of x and weight."""
    x, weight = call.x, call.weight
    rows.check_rows("x", x, ALLOWED)
    k = x.shape[-1]
    require(
        len(weight.shape) == 2 and weight.shape[1] == k,
        f"weight must be [N, {k}], to agree in K with x [..., K] {list(x.shape)}, got {list(weight.shape)}",
    )
    require(
        1 in weight.strides or any(size <= 1 for size in weight.shape),
        f"weight must have stride 1 along one dimension, got strides {list(weight.strides)}; call .contiguous() on it",
    )
    require(weight.dtype == x.dtype, f"weight must be {dtype_name(x.dtype)} as x is, got {dtype_name(weight.dtype)}")
    contract.check_precision(call.precision, x.dtype)


def check(call: LinearCall) -> None:
    check_operands(call)
    x, bias, residual = call.x, call.bias, call.residual
    n, kind = call.n, dtype_name(x.dtype)
    if bias is not None:
        fits = bias.shape == (n,) and bias.dtype == x.dtype
        require(fits, f"bias must be {kind}[{n}], got {dtype_name(bias.dtype)}{list(bias.shape)}")
        require(
            bias.stride(0) == 1 or n <= 1,
            f"bias must be contiguous, got stride {bias.stride(0)}; call .contiguous() on it",
        )
    if residual is not None:
        rows.check_rows("residual", residual, ALLOWED)
        shape = (*x.shape[:-1], n)
        fits = residual.shape == shape and residual.dtype == x.dtype
        came = f"{dtype_name(residual.dtype)}{list(residual.shape)}"
        require(fits, f"residual must be {kind}{list(shape)} as the output is, got {came}")
    known = ", ".join(ACTIVATIONS)
    require(call.activation in ACTIVATIONS, f"activation must be one of {known}, got {call.activation!r}")


def outputs(call: LinearCall) -> dict[str, TensorSpec]:
    return {"y": TensorSpec.contiguous((*call.x.shape[:-1], call.n), call.x.dtype, call.x.device)}


def cost(call: LinearCall) -> Cost:
    added = [call.bias, call.residual]
    flops = _FLOPS[call.activation] + sum(x is not None for x in added)
    return contract.cost(call.m, call.n, call.k, call.x, call.weight, *added, epilogue=flops)


def bucket(call: LinearCall) -> Bucket:
    """Whatever the epilogue is: it decides no tile. 't' where K is contiguous: as matmul's bucket has weight.t()."""
    layout = "t" if call.weight.stride(1) == 1 else "n"
    exact = f"n={call.n},k={call.k},{dtype_name(call.x.dtype)},{layout}"
    return Bucket(exact=exact + (",tf32" if call.precision == "tf32" else ""), scaled={"m": call.m})


def inputs(
    m: int, n: int, k: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none", batch: int = 0,
    layout_b: str = "contiguous", bias: bool = False, residual: bool = False, activation: str = "none",
    precision: str = "ieee", device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """`layout` is that of x and of the residual, `layout_b` the weight's; sums are about normal."""
    g = draw.generator(seed, device)
    x = rows.draw(m, k, dtype, g, layout, special, batch)
    weight = draw.matrix(n, k, dtype, g, layout_b)
    weight *= max(k, 1) ** -0.5
    return {
        "x": x,
        "weight": weight,
        "bias": draw.vector(n, dtype, g) if bias else None,
        "residual": rows.draw(m, n, dtype, g, layout, "none", batch) if residual else None,
        "activation": activation,
        "precision": precision,
    }


def _backward(call: Any, grads: Any) -> dict[str, Any]:
    """What the activation was given is computed again: the forward does not store it."""
    found = {"residual": grads.y} if "residual" in grads.needed else {}
    if not grads.needed & {"x", "weight", "bias"}:
        return found
    dz = grads.y
    if call.activation != "none":
        z = linear(call.x, call.weight, call.bias, precision=call.precision)
        dz = activation_backward(dz, z, call.activation)
    dz = dz.reshape(call.m, call.n)
    if "x" in grads.needed:
        found["x"] = matmul(dz, call.weight, call.precision).view(call.x.shape)
    if "weight" in grads.needed:
        found["weight"] = matmul(dz.t(), call.x.reshape(call.m, call.k), call.precision)
    if "bias" in grads.needed:
        found["bias"] = matmul(dz.new_ones(1, call.m), dz).view(call.n)  # the sum over rows, as a product sums: in fp32
    return found


def _torch(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, precision: str
) -> Tensor:
    y = ACTIVATIONS[activation](F.linear(x, weight, bias))
    return y if residual is None else y + residual


@op(
    check=check, outputs=outputs, cost=cost, bucket=bucket, inputs=inputs, allowed=contract.allowed,
    call_type=LinearCall,
    first=contract.gemv_first,
    kernels={
        "numba": "tilery.ops.matmul.numba.gemm:gemm",
        "cuda.hopper": "tilery.ops.matmul.cuda.hopper:gemm",
        "triton": "tilery.ops.matmul.triton.gemm:gemm",
        "cuda.gemv": "tilery.ops.matmul.cuda.gemv:gemv",
        "vendor": "vendor_kernels:linear",
    },
    baselines=baselines(torch=contract.peer(_torch), compile=contract.peer(Compiled(_torch))),
    model_sizes=lambda model: [{"n": layer.n, "k": layer.k} for layer in model.linears()],
    backward=_backward,
    cases=contract.with_gemv(("contiguous", "padded", "far"), "contiguous", {
        "test": [
            case(m=40, n=72, k=80, dtype="fp32", bias=True, residual=True, activation="gelu", refused_by=TF32),
            case(ROUNDS, m=40, n=72, k=80, dtype="fp16", bias=True, residual=True, activation="silu"),
            case(ROUNDS, m=40, n=72, k=80, dtype="bf16", bias=True, residual=True, activation="gelu_tanh"),
            case(m=130, n=136, k=72, dtype="fp16"),  # several tiles each way
            case(m=65, n=33, k=97, dtype="fp32", bias=True, activation="silu", refused_by=TF32),  # odd tails
            case(ROUNDS, m=65, n=33, k=97, dtype="bf16", residual=True),
            case(m=65, n=33, k=97, dtype="fp32", activation="gelu_tanh", refused_by=TF32),
            case(m=33, n=65, k=40, dtype="fp16", bias=True, activation="relu"),
            case(ROUNDS, m=33, n=44, k=40, dtype="fp16", residual=True),
            case(ROUNDS, m=1, n=128, k=256, dtype="bf16", bias=True, activation="gelu"),  # one row
            case(ROUNDS, m=6, n=75, k=1032, dtype="fp16", bias=True, residual=True, activation="silu"),  # a few
            case(m=3, n=300, k=64, dtype="fp32", bias=True, residual=True, activation="relu", refused_by=TF32),
            case(m=1, n=1, k=1, dtype="fp32", refused_by=TF32),
            case(m=0, n=64, k=64, dtype="fp16", bias=True),  # nothing to launch
            case(ROUNDS, m=64, n=0, k=64, dtype="fp16", residual=True),
            # no products at all
            case(m=40, n=24, k=0, dtype="fp32", bias=True, residual=True, activation="silu", refused_by=TF32),
            case(m=5, n=64, k=64, dtype="fp32", batch=3, bias=True, residual=True, refused_by=TF32),  # 3-D
            case(ROUNDS, m=5, n=64, k=64, dtype="bf16", batch=3, bias=True, residual=True),
            case(ROUNDS, m=5, n=64, k=64, dtype="bf16", batch=3, residual=True),
            case(m=40, n=64, k=64, dtype="fp32", layout_b="transposed", bias=True, refused_by=TF32),
            case(ROUNDS, m=33, n=64, k=64, dtype="fp16", layout="padded", residual=True),
            case(ROUNDS, m=33, n=40, k=65, dtype="bf16", layout="misaligned", layout_b="misaligned", residual=True),
            case(ROUNDS, m=200, n=136, k=72, dtype="bf16", layout_b="transposed", bias=True, residual=True),
            case(ROUNDS, m=3, n=32, k=64, dtype="fp16", layout="far", residual=True),  # more than 2**31 elements
            case(FAR, m=32, n=64, k=64, dtype="fp16", layout_b="far"),
            case(m=32, n=64, k=64, dtype="fp32", special="nan", bias=True, activation="relu", refused_by=TF32),
            case(m=32, n=64, k=64, dtype="fp32", special="inf", activation="silu", refused_by=TF32),
            case(ROUNDS, m=32, n=64, k=64, dtype="fp16", special="inf", residual=True),
            case(m=64, n=72, k=96, dtype="fp32", precision="tf32", bias=True, refused_by=TF32),
            case(m=33, n=65, k=97, dtype="fp32", precision="tf32", refused_by=TF32),
        ],
        "bench": [
            case(m=m, n=4096, k=k, dtype="bf16", residual=True) for m, k in ((16, 4096), (4096, 4096), (4096, 14336))
        ],
        "bench_cpu": [
            case(m=1024, n=1024, k=1024, dtype="fp32", bias=True, activation="gelu"),
            case(m=1024, n=1024, k=1024, dtype="bf16", residual=True),
        ],
    }),
)  # fmt: skip
def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None,
    activation: str = "none", precision: str = "ieee",
) -> Tensor:  # fmt: skip
    """y = act(x · weightᵀ + bias) + residual, rounded once; x [..., K], weight [N, K], bias [N], residual, y [..., N].

    activation: none, relu, gelu, gelu_tanh or silu; precision tf32 lets tensor cores round fp32 to 11 bits.
    """
    y = ACTIVATIONS[activation](F.linear(x, weight, bias))
    return y if residual is None else y + residual
