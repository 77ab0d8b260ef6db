"""Contracts of embedding and embedding_backward."""

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


# A gradient of the table is a sum over ids, in fp32.
_SUMMED = {torch.float32: 5e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}


def _check_ids(ids: TensorSpec) -> None:
    require(ids.dtype in _IDS.values(), f"ids must be int32 or int64, got {dtype_name(ids.dtype)}")
    dense = rows.like(ids).strides
    lies = all(a == b or size <= 1 for a, b, size in zip(ids.strides, dense, ids.shape))
    require(lies, f"ids must be contiguous, got strides {list(ids.strides)}; call .contiguous() on it")


def _drawn_ids(m: int, v: int, ids: str, batch: int, outside: bool, g: torch.Generator) -> Tensor:
    """m ids of v rows, or [batch, m]; `outside`: the first five lead outside of the table."""
    drawn = torch.randint(max(v, 1), (max(batch, 1) * m,), generator=g, device=g.device, dtype=_IDS[ids])
    if outside:
        wrong = (-1, v, 2**32, 2**62, -(2**63)) if ids == "int64" else (-1, v, v + 1, 2**31 - 1, -(2**31))
        drawn[: len(wrong)] = torch.tensor(wrong, dtype=_IDS[ids], device=g.device)[: len(drawn)]
    return drawn.view(batch, m) if batch else drawn


# Backward


def _check_backward(call: Call) -> None:
    _check_ids(call.ids)
    rows.check_rows("dy", call.dy, _SUMMED)
    shape = call.ids.shape
    require(
        call.dy.shape[:-1] == shape,
        f"dy must be [..., N] with a row for each id {list(shape)}, got {list(call.dy.shape)}",
    )
    require(call.v >= 0, f"v must be 0 or more, the rows of the table, got {call.v}")


def _backward_outputs(call: Call) -> dict[str, TensorSpec]:
    return {"dtable": TensorSpec.contiguous((call.v, call.dy.shape[-1]), call.dy.dtype, call.dy.device)}


def _backward_cost(call: Call) -> Cost:
    n, size = call.dy.shape[-1], call.dy.dtype.itemsize
    return Cost(rows_of(call.dy).m * n, call.dy.nbytes + call.ids.nbytes, call.v * n * size)


def _backward_bucket(call: Call) -> Bucket:
    m, n, _ = rows_of(call.dy)
    return Bucket(exact=f"n={n},v={call.v},{dtype_name(call.dy.dtype)}", scaled={"m": m})


def _check_backward_indices(call: Call) -> None:
    require_between("ids", call.ids, 0, call.v - 1)


def _backward_inputs(
    m: int, n: int, v: int = 128256, dtype: str = "bf16", ids: str = "int64", layout: str = "contiguous",
    special: str = "none", batch: int = 0, outside: bool = False, device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """As embedding's, but `layout` and `special` are dy's."""
    g = draw.generator(seed, device)
    dy = rows.draw(m, n, dtype, g, layout, special, batch)
    return {"dy": dy, "ids": _drawn_ids(m, v, ids, batch, outside, g), "v": v}


def _torch_backward(dy: Tensor, ids: Tensor, v: int) -> Tensor:
    """A padding_idx of -1 is none."""
    found: Tensor = torch.ops.aten.embedding_dense_backward(dy, ids, v, -1, False)
    return found


@op(
    check=_check_backward, outputs=_backward_outputs, cost=_backward_cost, bucket=_backward_bucket,
    inputs=_backward_inputs, allowed=_SUMMED,
    kernels={
        "numba": "numba_embedding_backward:embedding_backward",
        "triton": "triton_embedding_backward:embedding_backward",
    },
    baselines=baselines(torch=_torch_backward, compile=Compiled(_torch_backward)),
    model_sizes=lambda model: [{"n": model.hidden_size, "v": model.vocab_size}],
    indices=_check_backward_indices,
    cases={
        "test": [
            case(m=40, n=1000, v=7, dtype="fp32"),  # most rows of the table several times
            case(m=40, n=1000, v=7, dtype="bf16"),
            case(m=40, n=64, v=50, dtype="fp16", ids="int32"),  # many of them never: zeros
            case(m=1, n=1, v=1, dtype="fp32"),
            case(m=2100, n=3, v=2, dtype="fp32"),  # more ids than a program of Triton's looks at together
            case(m=0, n=64, v=5, dtype="fp32"),
            case(m=4, n=0, v=50, dtype="bf16"),
            case(m=4, n=8, v=0, dtype="fp32"),  # nothing to launch
            case(m=4, n=96, v=5, dtype="fp16", batch=3),
            case(m=9, n=256, v=5, dtype="fp16", layout="padded"),
            case(m=9, n=67, v=5, dtype="bf16", layout="misaligned"),
            case(m=5, n=72, v=3, dtype="fp16", layout="far"),
            case(m=9, n=72, v=3, dtype="fp32", special="nan"),
            case(m=9, n=72, v=3, dtype="fp16", special="inf"),
            case(m=9, n=72, v=3, dtype="fp32", outside=True),  # what lies outside of the table counts nowhere
            case(m=9, n=72, v=3, dtype="bf16", ids="int32", outside=True),
        ],
        "bench": [case(m=m, n=4096, dtype="bf16") for m in (16, 8192)],
        "bench_cpu": [case(m=2048, n=1024, v=4096, dtype=dtype) for dtype in ("fp32", "bf16")],
    },
)  # fmt: skip
def embedding_backward(dy: Tensor, ids: Tensor, v: int) -> Tensor:
    """Gradient of embedding: dtable[i] = Σ dy[t] where ids[t] = i, in the order of t; dy [..., N], dtable [V, N].

    Ids outside of the table count nowhere.
    """
    dtable = dy.new_zeros(v, dy.shape[-1])
    inside = (ids >= 0) & (ids < v)
    return dtable.index_add(0, ids[inside].long(), dy[inside])


# Forward


def _check(call: Call) -> None:
    table = call.table
    _check_ids(call.ids)
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
    drawn = _drawn_ids(m, v, ids, batch, outside, g)
    return {"ids": drawn, "table": draw.matrix(v, n, dtype, g, layout, special)}


def _liger(ids: Tensor, table: Tensor) -> Any:
    return load("liger_kernel.ops.experimental.embedding").LigerEmbeddingFunction.apply(table, ids)


@op(
    check=_check, outputs=_outputs, cost=_cost, bucket=_bucket, inputs=_inputs, allowed=_EXACT,
    kernels={"numba": "numba_kernels:embedding", "triton": "triton_kernels:embedding"},
    baselines=baselines(torch=F.embedding, compile=Compiled(F.embedding), liger=_liger),
    model_sizes=lambda model: [{"n": model.hidden_size, "v": model.vocab_size}],
    indices=_check_indices,
    backward=lambda call, grads: {"table": embedding_backward(grads.y, call.ids, call.table.shape[0])},
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
