"""Contracts of merge_attention and its backward: one result of attention from those of parts of the keys."""

from typing import Any

import torch
from torch import Tensor

from tilery.base.errors import require
from tilery.base.spec import DTYPES, Bucket, Case, Cost, TensorSpec, case, dtype_name
from tilery.core import inputs as random
from tilery.core.op import op
from tilery.core.peers import Compiled, baselines
from tilery.ops.attention.attention import model_sizes
from tilery.ops.attention.merge_call import LAYOUTS, MergeCall
from tilery.ops.rope.heads import check_heads

_ALLOWED = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}
_LARGEST = 1024  # values of a head
_LONG_SUM = 256  # values, from which on a sum in fp32 is allowed more
_KINDS = tuple(map(dtype_name, _ALLOWED))


# Checks


def check(call: MergeCall) -> None:
    _check_parts(call)
    kinds = ", ".join(_KINDS)
    require(
        call.out_dtype in (None, *_KINDS), f"out_dtype must be None (that of outs), {kinds}, got {call.out_dtype!r}"
    )


def check_backward(call: MergeCall) -> None:
    _check_parts(call)
    result = call.result
    for name in ("result", "dout"):
        x = getattr(call, name)
        check_heads(name, x, call.layout)
        require(x.shape == call.outs.shape[1:], f"{name} must be {list(call.outs.shape[1:])}, got {list(x.shape)}")
        require(x.dtype == result.dtype, f"{name} must be {dtype_name(result.dtype)} as result is, got {_said(x)}")
    for name in ("lse", "dlse"):
        if (x := getattr(call, name)) is not None:
            fits = x.dtype == torch.float32 and x.shape == call.lses.shape[1:]
            require(fits, f"{name} must be fp32{list(call.lses.shape[1:])}, got {_said(x)}")


def _check_parts(call: MergeCall) -> None:
    outs, lses, layout = call.outs, call.lses, call.layout
    require(layout in LAYOUTS, f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    shape = ", ".join(["P", *layout.upper()])
    require(len(outs.shape) == len(layout) + 1, f"outs must be [{shape}] by layout {layout!r}, got {list(outs.shape)}")
    require(outs.dtype in _ALLOWED, f"outs must be one of {', '.join(_KINDS)}, got {dtype_name(outs.dtype)}")
    require(1 <= outs.shape[-1] <= _LARGEST, f"outs must have heads of 1 to {_LARGEST}, got {outs.shape[-1]}")
    require(
        outs.stride(-1) == 1 or outs.shape[-1] == 1,
        f"outs must have stride 1 along its last dimension, got {list(outs.strides)}; call .contiguous() on it",
    )
    want = _lse_shape(call)
    fits = lses.dtype == torch.float32 and lses.shape == want
    require(fits, f"lses must be fp32{list(want)}, heads before tokens, got {_said(lses)}")


def _lse_shape(call: MergeCall) -> tuple[int, ...]:
    parts, *rows, _ = call.outs.shape
    if call.layout != "bhsd":
        rows[-2:] = rows[:-3:-1]
    return (parts, *rows)


def _said(x: TensorSpec) -> str:
    return f"{dtype_name(x.dtype)}{list(x.shape)}"


# What they give and cost


def outputs(call: MergeCall) -> dict[str, TensorSpec]:
    dtype = call.outs.dtype if call.out_dtype is None else DTYPES[call.out_dtype]
    return {
        "out": TensorSpec.contiguous(call.outs.shape[1:], dtype, call.outs.device),
        "lse": TensorSpec.contiguous(call.lses.shape[1:], torch.float32, call.outs.device),
    }


def backward_outputs(call: MergeCall) -> dict[str, TensorSpec]:
    return {
        f"d{name}": TensorSpec.contiguous(x.shape, x.dtype, x.device)
        for name, x in (("outs", call.outs), ("lses", call.lses))
    }


def cost(call: MergeCall) -> Cost:
    parts, rows, *_ = call.sizes
    written = sum(x.nbytes for x in outputs(call).values())
    return Cost(2 * parts * rows * call.value_dim, call.outs.nbytes + call.lses.nbytes, written)


def backward_cost(call: MergeCall) -> Cost:
    parts, rows, *_ = call.sizes
    given = call.outs, call.lses, call.dout, call.dlse, call.result, call.lse
    read = sum(x.nbytes for x in given if x is not None)
    return Cost((3 * parts + 2) * rows * call.value_dim, read, call.outs.nbytes + call.lses.nbytes)


def backward_allowed(call: MergeCall) -> dict[torch.dtype, float]:
    """dlses are differences of two sums over a head's values: heads of 1000 were off by 1.1e-6 of their rms."""
    return _ALLOWED | {torch.float32: _ALLOWED[torch.float32] * max(1.0, call.value_dim / _LONG_SUM)}


def bucket(call: MergeCall) -> Bucket:
    kinds = ",".join(map(dtype_name, (call.outs.dtype, outputs(call)["out"].dtype)))
    return Bucket(f"parts={call.sizes.parts},e={call.value_dim},{kinds},{call.layout}", {"m": call.sizes.rows})


def backward_bucket(call: MergeCall) -> Bucket:
    kinds = ",".join(map(dtype_name, (call.outs.dtype, call.result.dtype)))
    return Bucket(f"parts={call.sizes.parts},e={call.value_dim},{kinds},{call.layout}", {"m": call.sizes.rows})


# Inputs and cases


def inputs(
    parts: int, m: int, heads: int = 4, n: int = 64, dtype: str = "fp32", out: str = "", batch: int = 1,
    order: str = "bshd", empty: str = "", strength: float = 3.0, layout: str = "contiguous", special: str = "none",
    device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """m queries of `batch` sequences with heads of n; `order` is the op's layout, `out` its out_dtype.

    lses are `strength` times normal. `empty` parts, "0+2", are NaN with an lse of -inf; "some": some rows of all, and
    all parts of the last. `special` stands in outs, or by "lse:nan" in lses.
    """
    g = random.generator(seed, device)
    batch = 1 if order == "thd" else batch
    where, _, what = special.rpartition(":")
    rows = random.matrix(parts * batch * m, heads * n, dtype, g, layout, "none" if where else special)
    outs = rows.unflatten(-1, (heads, n)).unflatten(0, (parts, batch, m))
    lses = torch.randn(parts, batch, heads, m, generator=g, device=g.device) * strength
    if empty == "some":
        lses[torch.rand(lses.shape, generator=g, device=g.device) < 0.4] = -torch.inf
        lses[..., -1:] = -torch.inf
    elif empty:
        lses[[int(part) for part in empty.split("+")]] = -torch.inf
    if where and lses.numel():
        lses.view(-1)[lses.numel() // 2] = random.SPECIALS[what]
    outs.masked_fill_(lses.transpose(2, 3).unsqueeze(-1) == -torch.inf, torch.nan)
    if order == "thd":
        outs, lses = outs.squeeze(1), lses.squeeze(1)
    return {
        "outs": outs.transpose(2, 3) if order == "bhsd" else outs, "lses": lses, "layout": order,
        "out_dtype": out or None,
    }  # fmt: skip


def backward_inputs(
    parts: int, m: int, heads: int = 4, n: int = 64, dtype: str = "fp32", out: str = "", batch: int = 1,
    order: str = "bshd", empty: str = "", strength: float = 3.0, dlse: bool = True, layout: str = "contiguous",
    special: str = "none", device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    given = inputs(parts, m, heads, n, dtype, out, batch, order, empty, strength, layout, special, device, seed)
    g = random.generator(seed + 1, device)
    wide = given["outs"].double(), given["lses"].double()
    result, lse = merge_attention.reference(*wide, given["layout"], None)
    kind = random.dtype_of(given.pop("out_dtype") or dtype)
    dout = torch.randn(result.shape, generator=g, device=g.device).to(kind)
    return {
        "dout": dout, "dlse": random.away_from_zero(lse.shape, g) if dlse else None, "outs": given["outs"],
        "lses": given["lses"], "result": result.to(kind), "lse": lse.float(), "layout": given["layout"],
    }  # fmt: skip


def cases() -> list[Case]:
    return [
        case(parts=2, m=7, heads=4, n=64, dtype="fp32"),
        case(parts=2, m=7, heads=4, n=64, dtype="fp16"),
        case(parts=2, m=7, heads=4, n=64, dtype="bf16"),
        case(parts=5, m=9, heads=2, n=128, dtype="fp32", out="bf16", batch=3),
        case(parts=5, m=9, heads=2, n=128, dtype="fp32", out="fp16", batch=3, order="bhsd"),
        case(parts=3, m=33, heads=3, n=80, dtype="fp16", out="fp32", order="thd"),
        case(parts=17, m=3, heads=5, n=31, dtype="fp32", batch=2, order="bhsd"),  # odd on every side
        case(parts=3, m=5, heads=2, n=512, dtype="bf16", out="bf16"),
        case(parts=3, m=5, heads=2, n=1000, dtype="fp16", order="thd"),
        case(parts=2, m=40, heads=1, n=1, dtype="fp32"),
        case(parts=1, m=5, heads=2, n=32, dtype="fp16"),  # what there is already
        case(parts=4, m=9, heads=4, n=32, dtype="fp32", strength=1e4),  # the largest part alone counts
        case(parts=4, m=11, heads=4, n=32, dtype="fp32", empty="1+3", batch=2),
        case(parts=3, m=11, heads=4, n=32, dtype="fp16", empty="some", order="thd"),
        case(parts=2, m=5, heads=2, n=32, dtype="fp32", empty="0+1"),  # zeros, -inf
        case(parts=3, m=5, heads=2, n=64, dtype="fp32", special="nan"),
        case(parts=3, m=5, heads=2, n=64, dtype="fp32", special="lse:nan", order="thd"),
        case(parts=3, m=5, heads=2, n=64, dtype="fp16", layout="padded", batch=2),
        case(parts=3, m=5, heads=2, n=30, dtype="bf16", layout="misaligned", order="bhsd"),
        case(parts=3, m=5, heads=2, n=64, dtype="fp32", layout="misaligned"),
        case(parts=2, m=3, heads=2, n=32, dtype="fp16", layout="far"),  # more than 2**31 elements, first to last
        case(parts=0, m=5, heads=2, n=32, dtype="fp32"),  # zeros, -inf
        case(parts=2, m=0, heads=2, n=32, dtype="fp32"),  # nothing to launch
        case(parts=2, m=5, heads=2, n=32, dtype="fp32", batch=0),
    ]


def backward_cases() -> list[Case]:
    found = [one for one in cases() if one.params["parts"] and not str(one.params.get("special")).startswith("lse")]
    return [*found, case(parts=3, m=9, heads=2, n=64, dtype="fp16", dlse=False)]


def bench_cases() -> dict[str, list[Case]]:
    return {
        "bench": [case(parts=p, m=m, heads=32, n=128, dtype="bf16") for p, m in ((2, 64), (2, 4096), (8, 1024))],
        "bench_cpu": [case(parts=4, m=512, heads=8, n=128, dtype=dtype) for dtype in ("fp32", "bf16")],
    }


def _heads_of(model: Any) -> list[dict[str, int]]:
    return [{"parts": 2, "heads": sizes["heads"], "n": sizes["n"]} for sizes in model_sizes(model)]


# Peers


def _torch(outs: Tensor, lses: Tensor, layout: str, out_dtype: str | None) -> tuple[Tensor, Tensor]:
    """In fp32; a row that all parts leave empty is NaN here."""
    p = lses.softmax(0)
    p = p if layout == "bhsd" else p.transpose(-1, -2)
    kind = outs.dtype if out_dtype is None else DTYPES[out_dtype]
    return (p.unsqueeze(-1) * outs).sum(0).to(kind), lses.logsumexp(0)


def _torch_backward(
    dout: Tensor, dlse: Tensor | None, outs: Tensor, lses: Tensor, result: Tensor, lse: Tensor, layout: str
) -> tuple[Tensor, Tensor]:
    """In fp32; a row that all parts leave empty is NaN here."""
    p = torch.exp(lses - lse)
    shift = (dout.float() * result).sum(-1) - (0 if dlse is None else _by_row(dlse, layout).squeeze(-1))
    dlses = _by_row(p, layout).squeeze(-1) * ((dout.float() * outs).sum(-1) - shift)
    douts = (_by_row(p, layout) * dout).to(outs.dtype)
    return douts, dlses if layout == "bhsd" else dlses.transpose(-1, -2).contiguous()


def _backward(call: Any, grads: Any) -> dict[str, Tensor]:
    dout = torch.zeros_like(call.out) if grads.out is None else grads.out
    douts, dlses = merge_attention_backward(dout, grads.lse, call.outs, call.lses, call.out, call.lse, call.layout)
    return {"outs": douts, "lses": dlses}


# The ops


def _by_row(lses: Tensor, layout: str) -> Tensor:
    """Tokens and heads in the order of a result, and one dimension more."""
    return (lses if layout == "bhsd" else lses.transpose(-1, -2)).unsqueeze(-1)


@op(
    check=check_backward, outputs=backward_outputs, cost=backward_cost, bucket=backward_bucket,
    inputs=backward_inputs, allowed=backward_allowed, call_type=MergeCall, rows_cancel=True,
    kernels={
        "numba": "tilery.ops.attention.numba.merge:merge_attention_backward",
        "triton": "tilery.ops.attention.triton.merge:merge_attention_backward",
    },
    baselines=baselines(torch=_torch_backward, compile=Compiled(_torch_backward)),
    model_sizes=_heads_of, cases={"test": backward_cases(), **bench_cases()},
)  # fmt: skip
def merge_attention_backward(
    dout: Tensor, dlse: Tensor | None, outs: Tensor, lses: Tensor, result: Tensor, lse: Tensor, layout: str = "bshd"
) -> tuple[Tensor, Tensor]:
    """Gradients of merge_attention, which gave result and lse: douts[p] = P · dout, P = exp(lses[p] - lse).

    dlses[p] = P · (sum(dout · outs[p]) - sum(dout · result) + dlse). dlse None is zero. An empty part has zeros.
    """
    there = lses != -torch.inf
    p = torch.exp(torch.where(there, lses - lse, -torch.inf))
    rows = _by_row(p, layout)
    kept = outs.masked_fill(~_by_row(there, layout), 0.0)
    shift = (dout * result).sum(-1) - (0 if dlse is None else _by_row(dlse, layout).squeeze(-1))
    dlses = rows.squeeze(-1) * ((dout * kept).sum(-1) - shift)
    dlses = dlses if layout == "bhsd" else dlses.transpose(-1, -2)
    return (rows * dout).masked_fill(~_by_row(there, layout), 0.0), dlses.masked_fill(~there, 0.0)


@op(
    check=check, outputs=outputs, cost=cost, bucket=bucket, inputs=inputs, allowed=_ALLOWED, call_type=MergeCall,
    kernels={
        "numba": "tilery.ops.attention.numba.merge:merge_attention",
        "triton": "tilery.ops.attention.triton.merge:merge_attention",
    },
    baselines=baselines(torch=_torch, compile=Compiled(_torch)),
    model_sizes=_heads_of, backward=_backward, cases={"test": cases(), **bench_cases()},
)  # fmt: skip
def merge_attention(
    outs: Tensor, lses: Tensor, layout: str = "bshd", out_dtype: str | None = None
) -> tuple[Tensor, Tensor]:
    """One result of attention from those of parts of the keys: out = Σ exp(lses[p] - lse) · outs[p], and its lse.

    outs [P, B, S, H, E] and lses [P, B, H, S] are what attention_lse gives for each part, lse = log(Σ exp(lses[p])); by
    layout "bhsd" outs is [P, B, H, S, E], by "thd" [P, T, H, E] beside lses [P, H, T]. Sums are fp32, in the order of
    the parts. A part whose lse is -inf is empty: its values are not read. A row that all parts leave empty gives zeros
    and -inf; NaN gives NaN. out_dtype None is that of outs.
    """
    top = lses.amax(0) if len(lses) else lses.new_full(lses.shape[1:], -torch.inf)
    p = torch.exp(lses - top.masked_fill(top == -torch.inf, 0.0))
    total = p.sum(0)
    kept = outs.masked_fill(_by_row(lses == -torch.inf, layout), 0.0)
    weights = _by_row(p / total.masked_fill(total == 0, 1.0), layout)
    return (weights * kept).sum(0), top + torch.log(total)
