import torch
from torch import Tensor

from tilery.base.errors import require
from tilery.base.spec import Bucket, Cost, TensorSpec, case
from tilery.core import inputs as draw
from tilery.core.op import op
from tilery.core.peers import Compiled, baselines
from tilery.parts import rows

ALLOWED = {torch.int64: 0.0}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check(logits: TensorSpec) -> None:
    rows.check_rows("logits", logits, DTYPES)
    require(logits.shape[-1] >= 1, f"logits must be [..., N] with N at least 1, got {list(logits.shape)}")


def outputs(logits: TensorSpec) -> tuple[TensorSpec, ...]:
    return (TensorSpec.contiguous(logits.shape[:-1], torch.int64, logits.device),)


def cost(logits: TensorSpec) -> Cost:
    m, n, _ = rows.rows(logits)
    return Cost(m * n, logits.nbytes, 8 * m)


def bucket(logits: TensorSpec) -> Bucket:
    return rows.bucket_rows(logits)


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
    kernels=("numba", "triton"),
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
