"""What the contracts of rotary ops share: q and k, the angles that rotate them, checks, costs, references and cases.

A pair (a, b) of a head at position p becomes (a cos - b sin, b cos + a sin), with cos and sin of row p. Pair i is made
of the values i and i + R/2 of the head, or of 2i and 2i + 1 where they are interleaved. Values from R on stay.
A position outside of the table gives NaN: nothing is read out of bounds, and nothing looks sound.
"""

from typing import Any

import torch
from torch import Tensor

from tilery.base.errors import require
from tilery.base.spec import Bucket, Case, Cost, TensorSpec, case, dtype_name
from tilery.core import inputs as random
from tilery.core.indices import require_between
from tilery.ops.rope.call import RopeCall, heads
from tilery.ops.rope.heads import check_beside, check_heads

# Rounding the result to bf16 alone costs 1.7e-3, to fp16 2.1e-4.
ALLOWED = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}


# Checks


def check(call: RopeCall) -> None:
    check_heads("q", call.q, call.layout)
    check_beside("k", call.k, "q", call.q, call.layout)
    _check_angles(call.q, call.cos, call.sin)
    shape, packed = call.q_heads, call.layout == "thd"
    if call.positions is None:
        require(not packed, "positions must be given for layout 'thd': packed tokens have no place of their own")
        require(
            call.cos.shape[0] >= shape.tokens,
            f"cos must have a row for each of the {shape.tokens} positions, got {call.cos.shape[0]}; "
            "positions say others",
        )
        return
    check_integers("positions", call.positions, (shape.tokens,) if packed else (shape.batch, shape.tokens))


def check_integers(name: str, x: TensorSpec, shape: tuple[int, ...]) -> None:
    require(x.dtype in (torch.int32, torch.int64), f"{name} must be int32 or int64, got {dtype_name(x.dtype)}")
    require(x.shape == shape, f"{name} must be {list(shape)}, one per token, got {list(x.shape)}")
    even = TensorSpec.contiguous(shape, x.dtype, x.device).strides
    dense = all(size <= 1 or a == b for size, a, b in zip(x.shape, x.strides, even))
    require(dense, f"{name} must be contiguous, got strides {list(x.strides)}; call .contiguous() on it")


def _check_angles(q: TensorSpec, cos: TensorSpec, sin: TensorSpec) -> None:
    for name, x in (("cos", cos), ("sin", sin)):
        require(len(x.shape) == 2, f"{name} must be [positions, R / 2], got {list(x.shape)}")
        require(x.stride(1) == 1 or x.shape[1] <= 1, f"{name} must have stride 1 along a row, got {x.stride(1)}")
        dtypes = dict.fromkeys((torch.float32, q.dtype))
        known = ", ".join(map(dtype_name, dtypes))
        require(x.dtype in dtypes, f"{name} must be {known}, got {dtype_name(x.dtype)}")
    same = cos.shape == sin.shape and cos.dtype == sin.dtype
    require(
        same,
        f"sin must be as cos, {dtype_name(cos.dtype)}{list(cos.shape)}, got {dtype_name(sin.dtype)}{list(sin.shape)}",
    )
    half, size = cos.shape[1], q.shape[-1]
    require(
        1 <= half <= size // 2,
        f"cos must be [positions, R / 2] with R from 2 to the head's {size}, got {list(cos.shape)}; "
        "of a table with both halves alike pass the first, cos[:, : R // 2]",
    )


def check_positions(call: RopeCall) -> None:
    """Every position must be a row of cos and sin."""
    if call.positions is not None:
        require_between("positions", call.positions, 0, call.cos.shape[0] - 1)


# References


def rotated(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, layout: str, interleaved: bool, inverse: bool = False
) -> Tensor:
    """x with its heads rotated by their positions' angles, or back by them."""
    half = cos.shape[1]
    cos, sin = (_rows_of_tokens(t, x, positions, layout) for t in (cos, -sin if inverse else sin))
    a, b = _pairs(x, half, interleaved)
    pair = a * cos - b * sin, b * cos + a * sin
    made = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((made, x[..., 2 * half :]), -1)


def _pairs(x: Tensor, half: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved:
        return x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    return x[..., :half], x[..., half : 2 * half]


def angle_gradients(
    rotations: tuple[tuple[Tensor, Tensor], ...], cos: Tensor, positions: Tensor | None, layout: str, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of cos and sin, in plain torch; `rotations`: what was rotated, and the gradients of the results."""
    half, axis, wide = cos.shape[1], -3 if layout == "bhsd" else -2, torch.promote_types(cos.dtype, torch.float32)
    by_token: list[Any] = [0, 0]
    for x, grad in rotations:
        (a, b), (da, db) = (_pairs(t.to(wide), half, interleaved) for t in (x, grad))
        by_token[0] = by_token[0] + (da * a + db * b).sum(axis)
        by_token[1] = by_token[1] + (db * a - da * b).sum(axis)
    if positions is None:
        positions = torch.arange(by_token[0].shape[-2], device=cos.device).expand(by_token[0].shape[:-1])
    inside = (positions >= 0) & (positions < len(cos))
    rows, table = positions[inside].long(), torch.zeros_like(cos, dtype=wide)
    dcos, dsin = (table.index_put((rows,), d[inside], accumulate=True).to(cos.dtype) for d in by_token)
    return dcos, dsin


def _rows_of_tokens(table: Tensor, x: Tensor, positions: Tensor | None, layout: str) -> Tensor:
    """The row of every token, to be multiplied with all of its heads."""
    if positions is None:
        rows = table[: heads(x, layout).tokens]
    else:
        outside = (positions < 0) | (positions >= len(table))
        rows = table[positions.masked_fill(outside, 0).long()] if len(table) else table.new_empty(*positions.shape, 1)
        rows = rows.masked_fill(outside.unsqueeze(-1), float("nan"))
    return rows.unsqueeze(-3 if layout == "bhsd" else -2)


# Costs


def cost(call: RopeCall) -> Cost:
    return _cost(call, values=call.q_heads.size)


def cost_in_place(call: RopeCall) -> Cost:
    """The values that are not rotated need not be touched."""
    return _cost(call, values=2 * call.half)


def _cost(call: RopeCall, values: int) -> Cost:
    """`values`: how many of each head are read and written."""
    count = call.tokens * (call.q_heads.heads + call.k_heads.heads)
    moved = count * values * call.q.dtype.itemsize
    table = 2 * min(call.cos.shape[0], call.tokens) * call.half * call.cos.dtype.itemsize
    positions = call.positions.nbytes if call.positions else 0
    return Cost(6 * count * call.half, moved + table + positions, moved)


def bucket(call: RopeCall) -> Bucket:
    q, k = call.q_heads, call.k_heads
    exact = f"q={q.heads},k={k.heads},d={q.size},r={2 * call.half},{dtype_name(call.q.dtype)},{call.layout}"
    return Bucket(exact=exact + (",interleaved" if call.interleaved else ""), scaled={"m": call.tokens})


# Cases


def draw(
    m: int, heads: int = 3, kv_heads: int = 2, n: int = 16, dtype: str = "bf16", batch: int = 1, rotary: int = 0,
    order: str = "bshd", places: str = "none", angles: str = "fp32", interleaved: bool = False,
    layout: str = "contiguous", special: str = "none", device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """q, k, v and what rotates them: m tokens a sequence, heads of n of which `rotary` (0: all) are rotated.

    `order` is the op's layout. Where `layout` is not contiguous, q, k and v are views of one tensor, as a model's qkv.
    `places` is the dtype of the positions, or none, or outside (int64) or outside32: some are not in the table.
    """
    g = random.generator(seed, device)
    q, k, v = _qkv(m * batch, (heads, kv_heads, kv_heads), n, dtype, g, layout, special, order, batch)
    table = m + 5
    angle = torch.rand(table, (rotary or n) // 2, generator=g, device=g.device) * 6.28
    kind = random.dtype_of(dtype if angles == "same" else angles)
    cos, sin = angle.cos().to(kind), angle.sin().to(kind)
    return {
        "q": q, "k": k, "v": v, "cos": cos, "sin": sin, "positions": _positions(m, batch, table, order, places, g),
        "layout": order, "interleaved": interleaved,
    }  # fmt: skip


def _qkv(tokens, counts, n, dtype, g, layout, special, order, batch):  # type: ignore[no-untyped-def]
    widths = [count * n for count in counts]
    if layout == "contiguous":
        flat = [random.matrix(tokens, width, dtype, g, special=special) for width in widths]
    else:
        flat = list(random.matrix(tokens, sum(widths), dtype, g, layout, special).split(widths, -1))
    made = [x.unflatten(-1, (count, n)) for x, count in zip(flat, counts)]
    if order == "thd":
        return made
    made = [x.unflatten(0, (batch, -1)) if batch > 1 else x.unsqueeze(0) for x in made]
    return [x.transpose(1, 2) for x in made] if order == "bhsd" else made


def _positions(m: int, batch: int, table: int, order: str, places: str, g: Any) -> Tensor | None:
    if places == "none" and order != "thd":
        return None
    shape = (m * batch,) if order == "thd" else (batch, m)
    made = torch.randint(0, table, shape, generator=g, device=g.device)
    if places.startswith("outside"):
        wrong = (-1, table, 2**31 - 1, -(2**31)) if places == "outside32" else (-1, table, 2**32, 2**62, -(2**63))
        made.view(-1)[: len(wrong)] = torch.tensor(wrong, device=g.device)[: made.numel()]
    return made.to(torch.int32 if places in ("int32", "outside32") else torch.int64)


def cases() -> list[Case]:
    """What every op that rotates heads must bear."""
    odd = {"cutile": "R / 2 must be a power of two"}
    return [
        case(m=4, heads=2, kv_heads=1, n=6, dtype="fp32", refused_by=odd),
        case(m=5, heads=3, kv_heads=2, n=128, dtype="bf16"),
        case(m=5, heads=3, kv_heads=2, n=128, dtype="fp16", interleaved=True),
        case(m=3, heads=9, kv_heads=1, n=64, dtype="fp32", batch=2, places="int64"),  # heads that fill no tile
        case(m=3, heads=4, kv_heads=4, n=96, dtype="fp16", batch=2, order="bhsd", places="int32", refused_by=odd),
        case(m=7, heads=4, kv_heads=2, n=64, dtype="bf16", rotary=32, order="thd", places="int32", angles="same"),
        case(m=4, heads=4, kv_heads=2, n=80, dtype="fp32", rotary=24, order="thd", places="int64", refused_by=odd),
        case(m=3, heads=4, kv_heads=2, n=64, dtype="fp16", angles="same"),
        case(m=4, heads=2, kv_heads=2, n=80, dtype="fp16", rotary=24, interleaved=True, order="bhsd", refused_by=odd),
        case(m=1, heads=1, kv_heads=1, n=2, dtype="fp32"),
        case(m=1, heads=8, kv_heads=2, n=128, dtype="bf16", batch=3, places="int32"),  # decode
        case(m=0, heads=4, kv_heads=2, n=64, dtype="fp32", order="thd"),  # nothing to launch
        case(m=4, heads=4, kv_heads=2, n=64, dtype="fp16", layout="padded"),
        case(m=4, heads=4, kv_heads=2, n=64, dtype="fp32", layout="misaligned", interleaved=True),
        case(m=4, heads=3, kv_heads=2, n=64, dtype="bf16", layout="misaligned", order="bhsd"),
        case(m=3, heads=2, kv_heads=1, n=64, dtype="fp16", layout="far"),
        case(m=6, heads=2, kv_heads=1, n=32, dtype="fp32", places="outside"),
        case(m=6, heads=2, kv_heads=1, n=32, dtype="fp16", places="outside32", interleaved=True),
        case(m=3, heads=2, kv_heads=1, n=32, dtype="fp32", special="nan"),
        case(m=3, heads=2, kv_heads=1, n=32, dtype="fp16", special="inf", interleaved=True),
    ]


def bench_cases(**more: Any) -> dict[str, list[Case]]:
    """Llama 8B: a decode step of 16 sequences, a prefill of 8192 tokens, also as interleaved pairs."""
    model = {"heads": 32, "kv_heads": 8, "n": 128, "dtype": "bf16", **more}
    return {
        "bench": [case(m=16, **model), case(m=8192, **model), case(m=8192, interleaved=True, **model)],
        "bench_cpu": [case(m=2048, **model | {"heads": 24, "dtype": dtype}) for dtype in ("fp32", "bf16")],
    }
