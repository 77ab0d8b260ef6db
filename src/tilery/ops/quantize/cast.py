"""Contract of cast."""

from typing import Any

from torch import Tensor

from tilery.base.errors import require
from tilery.base.rows import rows as rows_of
from tilery.base.spec import DTYPES, Bucket, Cost, TensorSpec, case, dtype_name
from tilery.core import inputs as draw
from tilery.core.call import Call
from tilery.core.op import op
from tilery.core.peers import Compiled, baselines
from tilery.ops.quantize.formats import LARGEST
from tilery.ops.rows import contract as rows

_EXACT = dict.fromkeys(DTYPES.values(), 0.0)  # the reference rounds too


def _check(call: Call) -> None:
    rows.check_rows("x", call.x, _EXACT)
    require(call.dtype in DTYPES, f"dtype must be one of {', '.join(DTYPES)}, got {call.dtype!r}")


def _outputs(call: Call) -> dict[str, TensorSpec]:
    return {"y": rows.like(call.x, DTYPES[call.dtype])}


def _cost(call: Call) -> Cost:
    m, n, _ = rows_of(call.x)
    return Cost(0, call.x.nbytes, m * n * DTYPES[call.dtype].itemsize)


def _bucket(call: Call) -> Bucket:
    m, n, _ = rows_of(call.x)
    return Bucket(exact=f"n={n},{dtype_name(call.x.dtype)},{call.dtype}", scaled={"m": m})


def _inputs(
    m: int, n: int, dtype: str = "bf16", to: str = "fp32", layout: str = "contiguous", special: str = "none",
    batch: int = 0, device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    return {"x": rows.draw(m, n, dtype, draw.generator(seed, device), layout, special, batch), "dtype": to}


def _saturated(x: Tensor, dtype: str) -> Tensor:
    return x.clamp(-LARGEST[dtype], LARGEST[dtype]) if dtype in LARGEST else x


def _torch(x: Tensor, dtype: str) -> Tensor:
    wide = x.float() if dtype in LARGEST and x.dtype.itemsize == 1 else x
    return _saturated(wide, dtype).to(DTYPES[dtype])


@op(
    check=_check, outputs=_outputs, cost=_cost, bucket=_bucket, inputs=_inputs, allowed=_EXACT,
    kernels={"numba": "numba_kernels:cast", "triton": "triton_kernels:cast"},
    baselines=baselines(torch=_torch, compile=Compiled(_torch)),
    model_sizes=lambda model: [{"n": model.hidden_size}],
    cases={
        "test": [
            case(m=3, n=1000, dtype="fp32", to="fp16"),
            case(m=3, n=1000, dtype="bf16", to="fp32"),
            case(m=3, n=1000, dtype="fp16", to="fp32"),
            case(m=3, n=127, dtype="fp32", to="bf16"),
            case(m=3, n=127, dtype="fp32", to="e4m3"),
            case(m=3, n=256, dtype="fp16", to="e5m2"),
            case(m=3, n=256, dtype="bf16", to="e4m3"),
            case(m=3, n=256, dtype="e4m3", to="fp32"),
            case(m=3, n=127, dtype="e5m2", to="fp16"),
            case(m=1, n=1, dtype="e4m3", to="e5m2"),
            case(m=0, n=128, dtype="fp32", to="fp16"),
            case(m=2, n=96, dtype="fp16", to="fp32", batch=3),
            case(m=5, n=256, dtype="fp32", to="fp16", layout="padded"),
            case(m=5, n=257, dtype="bf16", to="fp32", layout="misaligned"),
            case(m=3, n=72, dtype="fp16", to="fp32", layout="far"),
            case(m=3, n=200, dtype="fp32", to="e4m3", special="nan"),
            case(m=3, n=200, dtype="fp16", to="e4m3", special="inf"),  # becomes 448
            case(m=3, n=200, dtype="e5m2", to="fp32", special="-inf"),
        ],
        "bench": [
            *(case(m=m, n=4096, dtype="bf16", to="fp32") for m in (16, 8192)),
            *(case(m=8192, n=4096, dtype=a, to=b) for a, b in (("fp32", "bf16"), ("bf16", "e4m3"), ("e4m3", "bf16"))),
        ],
        "bench_cpu": [case(m=2048, n=4096, dtype=a, to=b) for a, b in (("fp32", "bf16"), ("bf16", "fp32"))],
    },
)  # fmt: skip
def cast(x: Tensor, dtype: str) -> Tensor:
    """x [..., N] as fp32, fp16, bf16, e4m3 or e5m2, to nearest even; what is too large for fp8 becomes its largest."""
    return _saturated(x.double(), dtype).float().to(DTYPES[dtype]).double()
