"""Contracts of grouped_matmul and grouped_matmul_backward."""

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilery.base.errors import BadInput, require
from tilery.base.spec import Bucket, Cost, TensorSpec, case, dtype_name
from tilery.core import inputs as draw
from tilery.core.call import Call
from tilery.core.indices import require_between
from tilery.core.op import op
from tilery.core.peers import Saved, baselines
from tilery.ops.matmul import contract
from tilery.ops.matmul.call import GroupedCall, groups_hit, layout

if TYPE_CHECKING:
    from tilery.models.model import Model


# Groups of rows of a, and where they end


def _is_int32_vector(offsets: TensorSpec) -> bool:
    return offsets.dtype == torch.int32 and len(offsets.shape) == 1


def _described(offsets: TensorSpec) -> str:
    return f"{dtype_name(offsets.dtype)}{list(offsets.shape)}"


def _check_contiguous(offsets: TensorSpec) -> None:
    require(
        offsets.stride(0) == 1 or offsets.shape[0] <= 1,
        f"offsets must be contiguous, got stride {offsets.stride(0)}; call .contiguous() on it",
    )


def _sound(offsets: Tensor, rows: int) -> bool:
    """Whether they do not fall and lie between 0 and `rows`; for the reference, as it waits for the device."""
    return all(before <= end for before, end in pairwise((0, *offsets.tolist(), rows)))


def _check_offsets(call: Any) -> None:
    offsets = call.offsets
    require_between("offsets", offsets, 0, call.a.shape[0])
    falls = (offsets.diff() < 0).nonzero()
    if len(falls):
        i = int(falls[0]) + 1
        before, came = offsets[i - 1].item(), offsets[i].item()
        raise BadInput(f"offsets[{i}] must be {before} or more, as the entry before, got {came}")


# (rows, groups) -> which offset is spoilt, and what it says.
WRONG: dict[str, Any] = {
    "negative": lambda m, groups: (0, -5),
    "past": lambda m, groups: (groups - 1, m + 1),
    "past inside": lambda m, groups: (groups // 2, m + 1),
    "falls": lambda m, groups: (0, m),
    "largest": lambda m, groups: (groups // 2, 2**31 - 1),
    "least": lambda m, groups: (groups - 1, -(2**31)),
}


def _offsets(rows: int, groups: int, sizes: str, wrong: str, g: torch.Generator) -> Tensor:
    """Ends of groups of these sizes, random ones if none are given; spoilt if `wrong` is one of WRONG."""
    if sizes:
        given = [int(size) for size in sizes.split("+")]
        require(
            len(given) == groups and sum(given) <= rows, f"sizes must be {groups} of {rows} rows at most, got {sizes!r}"
        )
        offsets = torch.tensor(list(accumulate(given)), dtype=torch.int32, device=g.device)
    else:
        offsets = _random_offsets(rows, groups, g)
    if wrong in WRONG and groups:
        place, end = WRONG[wrong](rows, groups)
        offsets[place] = end
    return offsets


def _random_offsets(rows: int, groups: int, g: torch.Generator) -> Tensor:
    """As many groups have a row as `cost` says, so that the roof is true of every seed; the rest is random."""
    counts, hit = torch.zeros(groups, dtype=torch.int64, device=g.device), min(groups_hit(rows, groups), rows)
    if hit:
        chosen = torch.randperm(groups, generator=g, device=g.device)[:hit]
        more = chosen[torch.randint(hit, (rows - hit,), generator=g, device=g.device)]
        taken = torch.cat((chosen, more))
        counts = counts.scatter_add(0, taken, torch.ones_like(taken))
    return counts.cumsum(0).to(torch.int32)


def model_sizes(model: "Model") -> list[dict[str, int]]:
    """A case's m is the rows of all experts: tokens times the experts that each takes."""
    if not model.n_routed_experts:
        return []
    return [{"n": layer.n, "k": layer.k, "experts": model.n_routed_experts} for layer in model.mlp(model.mlp_size)]


# Rows of 16, 256 and 4096 tokens in Qwen3-30B-A3B (128 experts, 8 a token), and in one of eight ranks of DeepSeek-V3
# (256 experts).
_EXPERTS = [
    *((8 * tokens, n, k, 128) for tokens in (16, 256, 4096) for n, k in ((1536, 2048), (2048, 768))),
    *((tokens, n, k, 32) for tokens in (16, 256, 4096) for n, k in ((4096, 7168), (7168, 2048))),
]


_BENCH = [case(m=m, n=n, k=k, experts=experts, dtype="bf16") for m, n, k, experts in _EXPERTS]
_BENCH_CPU = [
    case(m=512, n=512, k=512, experts=8, dtype="fp32"),
    case(m=16, n=768, k=1024, experts=16, dtype="bf16"),
]
_ends = Saved(lambda offsets: offsets.tolist())  # known to the host: that is not in the time of a loop


# Backward: the gradient of b; that of a is a grouped_matmul


def _check_backward(call: Call) -> None:
    dc, a, offsets = call.dc, call.a, call.offsets
    contract.check_operand("dc", dc, "[T, N]")
    contract.check_operand("a", a, "[T, K]")
    require(dc.dtype == a.dtype, f"dc must be {dtype_name(a.dtype)} as a is, got {dtype_name(dc.dtype)}")
    require(
        dc.shape[0] == a.shape[0],
        f"dc [T, N] and a [T, K] must agree in T, got {list(dc.shape)} and {list(a.shape)}",
    )
    require(
        _is_int32_vector(offsets), f"offsets must be int32[G], where each group of rows ends, got {_described(offsets)}"
    )
    _check_contiguous(offsets)


def _backward_outputs(call: Call) -> dict[str, TensorSpec]:
    shape = call.offsets.shape[0], call.a.shape[1], call.dc.shape[1]
    return {"db": TensorSpec.contiguous(shape, call.a.dtype, call.a.device)}


def _backward_cost(call: Call) -> Cost:
    (rows, k), n, groups = call.a.shape, call.dc.shape[1], call.offsets.shape[0]
    reads = call.a.nbytes + call.dc.nbytes + call.offsets.nbytes
    return Cost(flops=2 * rows * n * k, reads=reads, writes=groups * k * n * call.a.dtype.itemsize)


def _backward_bucket(call: Call) -> Bucket:
    (rows, k), n, groups = call.a.shape, call.dc.shape[1], call.offsets.shape[0]
    kind = f"{dtype_name(call.a.dtype)},{layout(call.a)}{layout(call.dc)}"
    return Bucket(exact=f"n={n},k={k},experts={groups},{kind}", scaled={"m": rows})


def _backward_inputs(
    m: int, n: int, k: int, experts: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none",
    layout_dc: str = "contiguous", sizes: str = "", wrong: str = "none", device: str = "cuda", seed: int = 0,
) -> dict[str, Tensor]:  # fmt: skip
    """`layout` and `special` are a's, the others as grouped_matmul's."""
    g = draw.generator(seed, device)
    a, dc = draw.matrix(m, k, dtype, g, layout, special), draw.matrix(m, n, dtype, g, layout_dc)
    return {"dc": dc, "a": a, "offsets": _offsets(m, experts, sizes, wrong, g)}


def _backward_loop(dc: Tensor, a: Tensor, offsets: Tensor) -> Tensor:
    """A torch.mm for each group."""
    db, start = a.new_empty(offsets.shape[0], a.shape[1], dc.shape[1]), 0
    for group, end in enumerate(_ends(offsets)):
        torch.mm(a[start:end].t(), dc[start:end], out=db[group])
        start = end
    return db


def _backward_torch(dc: Tensor, a: Tensor, offsets: Tensor) -> Tensor:
    return F.grouped_mm(a.t(), dc, offs=offsets)


@op(
    check=_check_backward, outputs=_backward_outputs, cost=_backward_cost, bucket=_backward_bucket,
    inputs=_backward_inputs, allowed=lambda call: contract.allowed_of_sums(call.a.dtype, call.a.shape[0]),
    kernels={
        "numba": "tilery.ops.matmul.numba.batched:grouped_matmul_backward",
        "triton": "tilery.ops.matmul.triton.grouped_backward:grouped_matmul_backward",
    },
    baselines=baselines(torch=_backward_torch, loop=_backward_loop), model_sizes=model_sizes, indices=_check_offsets,
    cases={
        "test": [
            case(m=70, n=33, k=97, experts=5, dtype="fp32"),  # odd tails on every side
            case(m=300, n=136, k=72, experts=4, dtype="fp16"),
            case(m=300, n=136, k=72, experts=4, dtype="bf16"),
            case(m=9, n=48, k=64, experts=12, dtype="bf16"),  # more groups than rows
            case(m=37, n=40, k=48, experts=6, dtype="fp16", sizes="0+17+0+1+19+0"),  # without rows a sum of nothing
            case(m=37, n=40, k=48, experts=3, dtype="fp32", sizes="5+0+12"),  # rows past the last group count nowhere
            case(m=37, n=40, k=48, experts=3, dtype="bf16", sizes="5+0+12"),
            case(m=12, n=20, k=32, experts=2, dtype="fp32", sizes="0+0"),
            case(m=12, n=20, k=32, experts=0, dtype="fp32"),  # nothing to launch
            case(m=33, n=40, k=64, experts=1, dtype="fp16"),
            case(m=1, n=1, k=1, experts=1, dtype="fp32"),
            case(m=0, n=16, k=16, experts=3, dtype="fp16"),
            case(m=16, n=0, k=16, experts=3, dtype="fp32"),
            case(m=20, n=24, k=0, experts=3, dtype="fp32"),
            case(m=40, n=24, k=64, experts=3, dtype="fp16", layout="transposed", layout_dc="transposed"),
            case(m=33, n=48, k=64, experts=3, dtype="fp16", layout="padded", layout_dc="padded"),
            case(m=33, n=40, k=65, experts=3, dtype="bf16", layout="misaligned", layout_dc="misaligned"),
            case(m=6, n=32, k=64, experts=2, dtype="fp16", layout="far"),  # more than 2**31 elements, first to last
            case(m=6, n=32, k=34, experts=3, dtype="fp16", layout_dc="far"),
            case(m=32, n=40, k=64, experts=3, dtype="fp32", special="nan"),
            case(m=32, n=40, k=64, experts=3, dtype="fp16", special="inf"),
            case(m=20, n=24, k=32, experts=2, dtype="fp32", special="nan", sizes="4+3"),  # in a row past the last
            *(case(m=37, n=40, k=48, experts=4, dtype="fp32", sizes="9+0+12+3", wrong=wrong) for wrong in WRONG),
            *(case(m=37, n=40, k=48, experts=1, dtype="fp16", wrong=wrong) for wrong in ("past", "least")),
            case(m=300, n=136, k=72, experts=4, dtype="bf16", wrong="falls"),
        ],
        "bench": _BENCH,
        "bench_cpu": _BENCH_CPU,
    },
)  # fmt: skip
def grouped_matmul_backward(dc: Tensor, a: Tensor, offsets: Tensor) -> Tensor:
    """Gradient of grouped_matmul's b: db[g] = Σ a[t]ᵀ · dc[t] over rows t of group g; dc [T, N], a [T, K].

    db is [G, K, N]; int32 offsets [G] are those of grouped_matmul: where they are wrong, all of db is NaN.
    """
    db, start = a.new_zeros(offsets.shape[0], a.shape[1], dc.shape[1]), 0
    if not _sound(offsets, a.shape[0]):
        return db.fill_(float("nan"))
    for group, end in enumerate(offsets.tolist()):
        db[group] = a[start:end].t() @ dc[start:end]
        start = end
    return db


# Forward


def check(call: GroupedCall) -> None:
    a, b, offsets = call.a, call.b, call.offsets
    contract.check_operand("a", a, "[T, K]")
    contract.check_operand("b", b, "[G, K, N]")
    contract.check_same_dtype(a, b)
    require(
        a.shape[1] == b.shape[1],
        f"a [T, K] and b [G, K, N] must agree in K, got {list(a.shape)} and {list(b.shape)}",
    )
    require(
        _is_int32_vector(offsets) and offsets.shape[0] == b.shape[0],
        f"offsets must be int32[{b.shape[0]}], where each of b's groups of rows of a ends, got {_described(offsets)}",
    )
    _check_contiguous(offsets)


def outputs(call: GroupedCall) -> dict[str, TensorSpec]:
    return {"c": TensorSpec.contiguous((call.rows, call.n), call.a.dtype, call.a.device)}


def cost(call: GroupedCall) -> Cost:
    rows, n, k, size = call.rows, call.n, call.k, call.a.dtype.itemsize
    weights = call.groups_hit * k * n * size
    return Cost(flops=2 * rows * n * k, reads=call.a.nbytes + weights + call.offsets.nbytes, writes=rows * n * size)


def bucket(call: GroupedCall) -> Bucket:
    kind = f"{dtype_name(call.a.dtype)},{layout(call.a)}{layout(call.b)}"
    return Bucket(exact=f"n={call.n},k={call.k},experts={call.groups},{kind}", scaled={"m": call.rows})


def inputs(
    m: int, n: int, k: int, experts: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none",
    layout_b: str = "transposed", sizes: str = "", wrong: str = "none", device: str = "cuda", seed: int = 0,
) -> dict[str, Tensor]:  # fmt: skip
    """b is of weights [G, N, K] unless said otherwise. `sizes`: rows of each group, as 3+0+5; else random ones.

    `wrong`: what is the matter with the offsets, one of WRONG.
    """
    g = draw.generator(seed, device)
    a = draw.matrix(m, k, dtype, g, layout, special)
    b = contract.draw(experts, k, n, dtype, g, layout_b)
    return {"a": a, "b": b, "offsets": _offsets(m, experts, sizes, wrong, g)}


def _backward(call: GroupedCall, grads: Any) -> dict[str, Any]:
    """Rows past the last group have the gradient 0, as grouped_matmul has it."""
    found = {}
    if "a" in grads.needed:
        found["a"] = grouped_matmul(grads.c, call.b.transpose(1, 2), call.offsets)
    if "b" in grads.needed:
        found["b"] = grouped_matmul_backward(grads.c, call.a, call.offsets)
    return found


def _loop(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """A torch.mm for each group that has rows."""
    c, start = a.new_empty(a.shape[0], b.shape[2]), 0
    for group, end in enumerate(_ends(offsets)):
        if end > start:
            torch.mm(a[start:end], b[group], out=c[start:end])
        start = end
    c[start:] = 0
    return c


def _torch(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """It leaves rows past the last group as they come."""
    return F.grouped_mm(a, b, offs=offsets)


FP32 = {"cuda.hopper": "wgmma takes fp16 and bf16"}
TMA = {"cuda.hopper": "with lines that start at multiples of 16 bytes"}


@op(
    check=check, outputs=outputs, cost=cost, bucket=bucket, inputs=inputs,
    allowed=lambda call: contract.allowed_of_sums(call.a.dtype, call.k),
    call_type=GroupedCall,
    kernels={
        "numba": "tilery.ops.matmul.numba.batched:grouped_matmul",
        "triton": "tilery.ops.matmul.triton.batched:grouped_matmul",
        "cutile": "tilery.ops.matmul.cutile.batched:grouped_matmul",
        "cuda.hopper": "tilery.ops.matmul.cuda.grouped:grouped_matmul",
    },
    baselines=baselines(torch=_torch, loop=_loop), model_sizes=model_sizes, indices=_check_offsets,
    backward=_backward,
    cases={
        "test": [
            case(m=70, n=33, k=97, experts=5, dtype="fp32", refused_by=FP32),  # odd tails on every side
            case(m=300, n=136, k=72, experts=4, dtype="fp16"),
            case(m=300, n=136, k=72, experts=4, dtype="bf16"),
            case(m=70, n=40, k=64, experts=3, dtype="bf16", layout_b="contiguous"),
            case(m=9, n=48, k=64, experts=12, dtype="bf16"),  # more groups than rows
            case(m=37, n=40, k=48, experts=6, dtype="fp16", sizes="0+17+0+1+19+0"),  # empty ones, one of one row
            # Rows past the last group are zero.
            case(m=37, n=40, k=48, experts=3, dtype="fp32", refused_by=FP32, sizes="5+0+12"),
            case(m=37, n=40, k=48, experts=3, dtype="bf16", sizes="5+0+12"),
            case(m=12, n=20, k=32, experts=2, dtype="fp32", refused_by=FP32, sizes="0+0"),
            case(m=12, n=20, k=32, experts=0, dtype="fp32", refused_by=FP32),
            case(m=33, n=40, k=64, experts=1, dtype="fp16"),
            case(m=1, n=1, k=1, experts=1, dtype="fp32", refused_by=FP32),
            case(m=0, n=16, k=16, experts=3, dtype="fp16"),  # nothing to launch
            case(m=16, n=0, k=16, experts=3, dtype="fp32", refused_by=FP32),
            case(m=20, n=24, k=0, experts=3, dtype="fp32", refused_by=FP32),  # a sum of nothing is zero
            case(m=40, n=24, k=64, experts=3, dtype="fp16", layout="transposed"),
            case(m=33, n=48, k=64, experts=3, dtype="fp16", layout="padded", layout_b="padded"),
            case(m=33, n=40, k=65, experts=3, dtype="bf16", layout="misaligned", layout_b="misaligned", refused_by=TMA),
            case(m=6, n=32, k=64, experts=2, dtype="fp16", layout="far"),  # more than 2**31 elements, first to last
            case(m=20, n=32, k=34, experts=3, dtype="fp16", layout_b="far", refused_by=TMA),
            case(m=9, n=40, k=257, experts=3, dtype="fp16", layout="far", layout_b="misaligned", refused_by=TMA),
            case(m=32, n=40, k=64, experts=3, dtype="fp32", refused_by=FP32, special="nan"),
            case(m=32, n=40, k=64, experts=3, dtype="fp16", special="inf"),
            # NaN in a row past the last group.
            case(m=20, n=24, k=32, experts=2, dtype="fp32", refused_by=FP32, special="nan", sizes="4+3"),
            *(
                case(m=37, n=40, k=48, experts=4, dtype="fp32", sizes="9+0+12+3", wrong=wrong, refused_by=FP32)
                for wrong in WRONG
            ),
            *(case(m=37, n=40, k=48, experts=1, dtype="fp16", wrong=wrong) for wrong in ("past", "least")),
            case(m=300, n=136, k=72, experts=4, dtype="bf16", wrong="falls"),
            case(m=37, n=40, k=0, experts=2, dtype="fp32", refused_by=FP32, wrong="past"),
        ],
        "bench": _BENCH,
        "bench_cpu": _BENCH_CPU,
    },
)  # fmt: skip
def grouped_matmul(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """c[t] = a[t] · b[g] for rows t of group g, 0 past all; a [T, K], b [G, K, N], int32 offsets [G]: groups' ends.

    Offsets must not fall, and lie between 0 and T: otherwise it is not known whose any row is, and all of c is NaN.
    """
    c, start = a.new_zeros(a.shape[0], b.shape[2]), 0
    if not _sound(offsets, a.shape[0]):
        return c.fill_(float("nan"))
    for group, end in enumerate(offsets.tolist()):
        c[start:end] = a[start:end] @ b[group]
        start = end
    return c
