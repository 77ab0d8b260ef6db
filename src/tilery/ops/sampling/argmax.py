"""Contract of argmax."""

import torch
from torch import Tensor

from tilery.base.errors import require
from tilery.base.rows import rows as rows_of
from tilery.base.spec import Bucket, Cost, TensorSpec, case
from tilery.core import inputs as draw
from tilery.core.call import Call
from tilery.core.op import op
from tilery.core.peers import Compiled, baselines
from tilery.ops.rows import contract as rows

ALLOWED = {torch.int64: 0.0}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check(call: Call) -> None:
    rows.check_rows("logits", call.logits, DTYPES)
    shape = list(call.logits.shape)
    require(shape[-1] >= 1, f"logits must be [..., N] with N at least 1, got {shape}")


def outputs(call: Call) -> dict[str, TensorSpec]:
    return {"index": TensorSpec.contiguous(call.logits.shape[:-1], torch.int64, call.logits.device)}


def cost(call: Call) -> Cost:
    m, n, _ = rows_of(call.logits)
    return Cost(m * n, call.logits.nbytes, 8 * m)


def bucket(call: Call) -> Bucket:
    return rows.bucket_rows(call.logits)


def inputs(
    m: int, n: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none", batch: int = 0,
    ties: bool = False, device: str = "cuda", seed: int = 0,
) -> dict[str, Tensor]:  # fmt: skip
    logits = rows.draw(m, n, dtype, draw.generator(seed, device), layout, special, batch)
    return {"logits": logits.mul(2).round() if ties else logits}


def _torch(logits: Tensor) -> Tensor:
    return torch.argmax(logits, -1)


@op(
    check=check, outputs=outputs, cost=cost, bucket=bucket, inputs=inputs, allowed=ALLOWED,
    kernels={"numba": "numba_kernels:argmax", "triton": "triton_kernels:argmax"},
    baselines=baselines(torch=_torch, compile=Compiled(_torch)),
    model_sizes=lambda model: [{"n": model.vocab_size}],
    cases={
        "test": [c for c in rows.cases() if c.params["n"]]
        + [case(m=5, n=3000, dtype=dtype, ties=True) for dtype in ("fp32", "bf16")],
        "bench": [case(m=m, n=128256, dtype="bf16") for m in (1, 16, 256)],
        "bench_cpu": [case(m=16, n=128256, dtype="fp32"), case(m=16, n=128256, dtype="bf16")],
    },
)  # fmt: skip
def argmax(logits: Tensor) -> Tensor:
    """Index of each row's largest value, of equals the lowest; the first NaN beats all. logits [..., N], y [...]."""
    return torch.argmax(logits, -1)
