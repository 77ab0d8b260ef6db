"""Contract of embedding."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilery.base.errors import require
from tilery.base.rows import rows as rows_of
from tilery.base.spec import Bucket, Cost, TensorSpec, case, dtype_name
from tilery.core import inputs as draw
from tilery.core.call import Call
from tilery.core.indices import require_between
from tilery.core.op import op
from tilery.core.peers import Compiled, baselines, load
from tilery.ops.rows import contract as rows

_EXACT = dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), 0.0)
_IDS = {"int32": torch.int32, "int64": torch.int64}


def _check(call: Call) -> None:
    ids, table = call.ids, call.table
    require(ids.dtype in _IDS.values(), f"ids must be int32 or int64, got {dtype_name(ids.dtype)}")
    dense = rows.like(ids).strides
    lies = all(a == b or size <= 1 for a, b, size in zip(ids.strides, dense, ids.shape))
    require(lies, f"ids must be contiguous, got strides {list(ids.strides)}; call .contiguous() on it")
    require(len(table.shape) == 2, f"table must be [V, N], got {list(table.shape)}")
    rows.check_rows("table", table, _EXACT)


def _outputs(call: Call) -> dict[str, TensorSpec]:
    shape = (*call.ids.shape, call.table.shape[1])
    return {"y": TensorSpec.contiguous(shape, call.table.dtype, call.table.device)}


def _cost(call: Call) -> Cost:
    y = _outputs(call)["y"]
    return Cost(0, call.ids.nbytes + y.nbytes, y.nbytes)


def _bucket(call: Call) -> Bucket:
    m, n, _ = rows_of(_outputs(call)["y"])
    return Bucket(exact=f"n={n},{dtype_name(call.table.dtype)}", scaled={"m": m})


def _check_indices(call: Call) -> None:
    require_between("ids", call.ids, 0, call.table.shape[0] - 1)


def _inputs(
    m: int, n: int, v: int = 128256, dtype: str = "bf16", ids: str = "int64", layout: str = "contiguous",
    special: str = "none", batch: int = 0, outside: bool = False, device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """m ids of v rows; `layout` and `special` are the table's; `outside` puts the first five ids outside of it."""
    g = draw.generator(seed, device)
    drawn = torch.randint(max(v, 1), (max(batch, 1) * m,), generator=g, device=g.device, dtype=_IDS[ids])
    if outside:
        wrong = (-1, v, 2**32, 2**62, -(2**63)) if ids == "int64" else (-1, v, v + 1, 2**31 - 1, -(2**31))
        drawn[: len(wrong)] = torch.tensor(wrong, dtype=_IDS[ids], device=g.device)[: len(drawn)]
    chosen = drawn.view(batch, m) if batch else drawn
    return {"ids": chosen, "table": draw.matrix(v, n, dtype, g, layout, special)}


def _liger(ids: Tensor, table: Tensor) -> Any:
    return load("liger_kernel.ops.experimental.embedding").LigerEmbeddingFunction.apply(table, ids)


@op(
    check=_check, outputs=_outputs, cost=_cost, bucket=_bucket, inputs=_inputs, allowed=_EXACT,
    kernels={"numba": "numba_kernels:embedding", "triton": "triton_kernels:embedding"},
    baselines=baselines(torch=F.embedding, compile=Compiled(F.embedding), liger=_liger),
    model_sizes=lambda model: [{"n": model.hidden_size, "v": model.vocab_size}],
    indices=_check_indices,
    cases={
        "test": [
            case(m=5, n=1000, v=50, dtype="fp32"),
            case(m=5, n=1000, v=50, dtype="bf16"),
            case(m=5, n=64, v=50, dtype="fp16", ids="int32"),
            case(m=1, n=1, v=1, dtype="fp32"),
            case(m=0, n=128, v=50, dtype="fp32"),
            case(m=4, n=0, v=50, dtype="bf16"),
            case(m=4, n=96, v=50, dtype="fp16", batch=3),
            case(m=9, n=256, v=20, dtype="fp16", layout="padded"),
            case(m=9, n=67, v=20, dtype="bf16", layout="misaligned"),
            case(m=9, n=72, v=3, dtype="fp16", layout="far"),
            case(m=9, n=72, v=3, dtype="fp32", special="nan"),
            case(m=9, n=72, v=3, dtype="fp32", outside=True),
            case(m=9, n=72, v=3, dtype="bf16", ids="int32", outside=True),
            case(m=9, n=72, v=3, dtype="fp16", layout="far", outside=True),
            case(m=4, n=8, v=0, dtype="fp32"),  # every id is outside
        ],
        "bench": [case(m=m, n=4096, dtype="bf16") for m in (16, 8192)],
        "bench_cpu": [case(m=2048, n=4096, v=32000, dtype="fp32"), case(m=2048, n=4096, v=32000, dtype="bf16")],
    },
)  # fmt: skip
def embedding(ids: Tensor, table: Tensor) -> Tensor:
    """y[...] = table[ids[...]]; ids [...], table [V, N], y [..., N]; an id outside of the table gives a row of NaN."""
    if not len(table):
        return table.new_full((*ids.shape, table.shape[1]), float("nan"))
    inside = (ids >= 0) & (ids < table.shape[0])
    found = table[torch.where(inside, ids, 0).long()]
    return torch.where(inside.unsqueeze(-1), found, float("nan"))
