"""Contract of transpose."""

from typing import Any

from torch import Tensor

from tilery.base.errors import require
from tilery.base.spec import DTYPES, Bucket, Cost, TensorSpec, case, dtype_name
from tilery.core import inputs as draw
from tilery.core.call import Call
from tilery.core.op import op
from tilery.core.peers import Compiled, baselines, load
from tilery.ops.rows import contract as rows

_EXACT = dict.fromkeys(DTYPES.values(), 0.0)


def _check(call: Call) -> None:
    require(len(call.x.shape) >= 2, f"x must be [..., M, N], got {list(call.x.shape)}")
    rows.check_rows("x", call.x, _EXACT)


def _outputs(call: Call) -> dict[str, TensorSpec]:
    *batch, m, n = call.x.shape
    return {"y": TensorSpec.contiguous((*batch, n, m), call.x.dtype, call.x.device)}


def _cost(call: Call) -> Cost:
    return Cost(0, call.x.nbytes, call.x.nbytes)


def _bucket(call: Call) -> Bucket:
    m, n = call.x.shape[-2:]
    return Bucket(exact=f"n={n},{dtype_name(call.x.dtype)}", scaled={"m": m})


def _inputs(
    m: int, n: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none", batch: int = 0,
    device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    return {"x": rows.draw(m, n, dtype, draw.generator(seed, device), layout, special, batch)}


def _torch(x: Tensor) -> Tensor:
    return x.transpose(-1, -2).contiguous()


@op(
    check=_check, outputs=_outputs, cost=_cost, bucket=_bucket, inputs=_inputs, allowed=_EXACT,
    kernels={"numba": "numba_kernels:transpose", "triton": "triton_kernels:transpose"},
    baselines=baselines(
        torch=_torch, compile=Compiled(_torch), tilegym=lambda x: load("tilegym.ops").transpose(x),
    ),
    model_sizes=lambda model: [{"n": model.hidden_size}],
    cases={
        "test": [
            case(m=70, n=130, dtype="fp32"),
            case(m=70, n=130, dtype="bf16"),
            case(m=64, n=128, dtype="fp16"),
            case(m=33, n=40, dtype="e4m3"),
            case(m=33, n=40, dtype="e5m2"),
            case(m=1, n=100, dtype="fp16"),
            case(m=100, n=1, dtype="fp32"),
            case(m=0, n=128, dtype="fp32"),
            case(m=4, n=0, dtype="bf16"),
            case(m=20, n=36, dtype="fp32", batch=3),
            case(m=5, n=256, dtype="fp16", layout="padded"),
            case(m=5, n=67, dtype="bf16", layout="misaligned"),
            case(m=3, n=72, dtype="fp16", layout="far"),
            case(m=20, n=20, dtype="fp32", special="nan"),
            case(m=20, n=20, dtype="fp16", special="inf"),
        ],
        "bench": [case(m=m, n=n, dtype="bf16") for m, n in ((16, 4096), (8192, 4096), (4096, 16384))],
        "bench_cpu": [case(m=2048, n=4096, dtype="fp32"), case(m=2048, n=4096, dtype="bf16")],
    },
)  # fmt: skip
def transpose(x: Tensor) -> Tensor:
    """xᵀ, contiguous; x [..., M, N] -> [..., N, M]."""
    return x.transpose(-1, -2).contiguous()
