"""Contract of splitk_reduce."""

from typing import Any

import torch
from torch import Tensor

from tilery.base.errors import require
from tilery.base.spec import DTYPES, Bucket, Cost, TensorSpec, case, dtype_name
from tilery.core import inputs as draw
from tilery.core.call import Call
from tilery.core.op import op
from tilery.core.peers import Compiled, baselines
from tilery.ops.matmul import contract

ALLOWED = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}
TO = tuple(map(dtype_name, ALLOWED))


def check(call: Call) -> None:
    parts = call.parts
    require(parts.dtype == torch.float32, f"parts must be fp32, got {dtype_name(parts.dtype)}")
    require(len(parts.shape) == 3, f"parts must be [S, M, N], got shape {list(parts.shape)}")
    require(
        parts.stride(2) == 1 or parts.shape[2] <= 1,
        f"parts [S, M, N] must have N contiguous, got strides {list(parts.strides)}; call .contiguous() on it",
    )
    require(call.out_dtype in TO, f"out_dtype must be one of {', '.join(TO)}, got {call.out_dtype!r}")


def outputs(call: Call) -> dict[str, TensorSpec]:
    return {"c": TensorSpec.contiguous(call.parts.shape[1:], DTYPES[call.out_dtype], call.parts.device)}


def cost(call: Call) -> Cost:
    count, m, n = call.parts.shape
    return Cost(flops=count * m * n, reads=call.parts.nbytes, writes=m * n * DTYPES[call.out_dtype].itemsize)


def bucket(call: Call) -> Bucket:
    count, m, n = call.parts.shape
    return Bucket(exact=f"parts={count},n={n},{call.out_dtype}", scaled={"m": m})


def inputs(
    parts: int, m: int, n: int, dtype: str = "fp32", layout: str = "contiguous", special: str = "none",
    out: str = "bf16", device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    return {"parts": contract.draw(parts, m, n, dtype, draw.generator(seed, device), layout, special), "out_dtype": out}


def _torch(parts: Tensor, out_dtype: str) -> Tensor:
    return parts.sum(0).to(DTYPES[out_dtype])


@op(
    check=check, outputs=outputs, cost=cost, bucket=bucket, inputs=inputs, allowed=ALLOWED,
    kernels={
        "numba": "tilery.ops.matmul.numba.splitk_reduce:splitk_reduce",
        "triton": "tilery.ops.matmul.triton.splitk_reduce:splitk_reduce",
        "cutile": "tilery.ops.matmul.cutile.splitk_reduce:splitk_reduce",
    },
    baselines=baselines(torch=_torch, compile=Compiled(_torch)),
    model_sizes=lambda model: [{"parts": 4, "n": layer.n} for layer in model.linears()],
    cases={
        "test": [
            case(parts=4, m=5, n=200, dtype="fp32", out="fp32"),
            case(parts=4, m=5, n=200, dtype="fp32", out="fp16"),
            case(parts=4, m=5, n=200, dtype="fp32", out="bf16"),
            case(parts=3, m=3, n=127, dtype="fp32", out="fp32"),  # odd on every side
            case(parts=13, m=3, n=1025, dtype="fp32", out="fp16"),
            case(parts=1, m=2, n=40, dtype="fp32", out="bf16"),
            case(parts=0, m=2, n=40, dtype="fp32", out="fp32"),  # a sum of nothing is zero
            case(parts=2, m=1, n=1, dtype="fp32", out="fp32"),
            case(parts=2, m=0, n=40, dtype="fp32", out="fp16"),  # nothing to launch
            case(parts=2, m=4, n=0, dtype="fp32", out="fp32"),
            case(parts=3, m=5, n=256, dtype="fp32", out="fp16", layout="padded"),
            case(parts=3, m=5, n=257, dtype="fp32", out="bf16", layout="misaligned"),
            case(parts=2, m=2, n=72, dtype="fp32", out="fp32", layout="far"),  # more than 2**31 elements, first to last
            case(parts=3, m=4, n=64, dtype="fp32", out="fp32", special="nan"),
            case(parts=3, m=4, n=64, dtype="fp32", out="fp16", special="inf"),
        ],
        "bench": [
            *(case(parts=s, m=16, n=4096, dtype="fp32") for s in (4, 16)),
            *(case(parts=s, m=512, n=8192, dtype="fp32") for s in (2, 8)),
        ],
        "bench_cpu": [
            case(parts=4, m=512, n=4096, dtype="fp32"),
            case(parts=8, m=512, n=1024, dtype="fp32", out="fp32"),
        ],
    },
)  # fmt: skip
def splitk_reduce(parts: Tensor, out_dtype: str = "bf16") -> Tensor:
    """c = Σ parts[s], added in the order of s in fp32, then rounded once; fp32 parts [S, M, N], c [M, N]."""
    return parts.sum(0)
