"""What contracts of gated activations, y = act(gate) · up, share: checks, costs, inputs, cases, references.

Packed, gate and up are the halves of one tensor [..., 2N], as a fused projection writes them.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilery.base.errors import require
from tilery.base.rows import rows as rows_of
from tilery.base.spec import Bucket, Case, Cost, TensorSpec, case, dtype_name
from tilery.core import inputs as draw
from tilery.ops.gated.activations import factor_and_slope
from tilery.ops.gated.call import GatedCall
from tilery.ops.rows import contract as rows

ALLOWED = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}


# Forward: gate, up -> y


def check(call: GatedCall) -> None:
    packed = call.packed
    if packed is None:
        rows.check_rows("gate", call.gate, ALLOWED)
        rows.check_rows("up", call.up, ALLOWED)
        rows.check_like("up", call.up, "gate", call.gate)
        return
    name = "x" if hasattr(call, "x") else "gate"
    rows.check_rows(name, packed, ALLOWED)
    require(
        packed.shape[-1] % 2 == 0,
        f"{name} must be [..., 2N], gate and then up, where up is not given, got {list(packed.shape)}",
    )


def outputs(call: GatedCall) -> dict[str, TensorSpec]:
    return {"y": rows.like(call.halves[0])}


def cost(call: GatedCall) -> Cost:
    """Negate, exp, add, divide, multiply; a cubic more for tanh, a polynomial of degree nine for none."""
    return rows.cost_rows(call.halves[0], flops={"silu": 5, "tanh": 9, "none": 25}[call.act], reads=2)


def bucket(call: GatedCall, *scalars: str) -> Bucket:
    m, n, _ = call.rows
    exact = (f"n={n}", dtype_name(call.gate.dtype), *scalars, *(["packed"] if call.up is None else []))
    return Bucket(exact=",".join(exact), scaled={"m": m})


def inputs(
    m: int, n: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none", batch: int = 0,
    packed: bool = False, device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """gate and up of n columns each; `special` stands in gate or, packed, first in a row of up."""
    g = draw.generator(seed, device)
    if packed:
        return {"gate": rows.draw(m, 2 * n, dtype, g, layout, special, batch), "up": None}
    gate = rows.draw(m, n, dtype, g, layout, special, batch)
    return {"gate": gate, "up": rows.draw(m, n, dtype, g, "contiguous", "none", batch)}  # differ in row stride


def packed_cases() -> list[Case]:
    return [
        case(m=3, n=4096, dtype="fp32", packed=True),
        case(m=3, n=127, dtype="bf16", packed=True),  # up starts at an odd element
        case(m=9, n=1, dtype="fp16", packed=True),
        case(m=0, n=128, dtype="fp32", packed=True),
        case(m=2, n=96, dtype="fp16", batch=3, packed=True),
        case(m=5, n=256, dtype="fp32", layout="misaligned", packed=True),
        case(m=3, n=72, dtype="fp16", layout="far", packed=True),
        case(m=3, n=200, dtype="fp32", special="nan", packed=True),
    ]


def exact_cases() -> list[Case]:
    """GELU without approximation."""
    return [
        case(m=3, n=1000, dtype="fp32", approximate="none"),
        case(m=3, n=127, dtype="bf16", approximate="none"),
        case(m=3, n=200, dtype="fp16", special="-inf", approximate="none"),
    ]


def bench_cases() -> dict[str, list[Case]]:
    return {
        "bench": [case(m=m, n=14336, dtype="bf16", packed=packed) for packed in (False, True) for m in (16, 8192)],
        "bench_cpu": [case(m=2048, n=4096, dtype=dtype) for dtype in ("fp32", "bf16")],
    }


def split(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """gate and up, of a packed tensor where up is None."""
    first, second = gate.chunk(2, -1) if up is None else (gate, up)
    return first, second


def reference(gate: Tensor, up: Tensor | None, act: str) -> Tensor:
    gate, up = split(gate, up)
    return gate * factor_and_slope(gate, act)[0] * up


# Backward: dy, gate, up -> dgate, dup; packed: dy, x -> dx


def check_backward(call: GatedCall) -> None:
    check(call)
    rows.check_rows("dy", call.dy, ALLOWED)
    rows.check_like("dy", call.dy, "gate", call.halves[0])


def backward_outputs(call: GatedCall) -> dict[str, TensorSpec]:
    return {"dgate": rows.like(call.gate), "dup": rows.like(call.gate)}


def packed_backward_outputs(call: GatedCall) -> dict[str, TensorSpec]:
    return {"dx": rows.like(call.x)}


def backward_cost(call: GatedCall) -> Cost:
    return rows.cost_rows(call.dy, flops=30 if call.act == "none" else 15, reads=3, writes=2)


def backward_bucket(call: GatedCall, *scalars: str) -> Bucket:
    m, n, _ = rows_of(call.dy)
    return Bucket(exact=",".join((f"n={n}", dtype_name(call.dy.dtype), *scalars)), scaled={"m": m})


def backward_inputs(
    m: int, n: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none", batch: int = 0,
    device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    dy = rows.draw(m, n, dtype, draw.generator(seed + 1, device), "contiguous", "none", batch)
    return {"dy": dy, **inputs(m, n, dtype, layout, special, batch, False, device, seed)}


def packed_backward_inputs(
    m: int, n: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none", batch: int = 0,
    device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    dy = rows.draw(m, n, dtype, draw.generator(seed + 1, device), "contiguous", "none", batch)
    return {"dy": dy, "x": inputs(m, n, dtype, layout, special, batch, True, device, seed)["gate"]}


def backward_cases() -> list[Case]:
    return [
        case(m=3, n=4096, dtype="fp32"),
        case(m=3, n=127, dtype="bf16"),
        case(m=5, n=1000, dtype="fp16"),
        case(m=9, n=1, dtype="fp32"),
        case(m=0, n=128, dtype="fp32"),
        case(m=2, n=96, dtype="fp16", batch=3),
        case(m=5, n=257, dtype="bf16", layout="misaligned"),
        case(m=3, n=72, dtype="fp16", layout="far"),
        case(m=3, n=200, dtype="fp32", special="nan"),
        case(m=3, n=200, dtype="fp16", special="-inf"),
    ]


def backward_bench_cases() -> dict[str, list[Case]]:
    return {
        "bench": [case(m=m, n=14336, dtype="bf16") for m in (16, 8192)],
        "bench_cpu": [case(m=2048, n=4096, dtype="fp32")],
    }


def backward_reference(dy: Tensor, gate: Tensor, up: Tensor, act: str) -> tuple[Tensor, Tensor]:
    factor, slope = factor_and_slope(gate, act)
    return dy * up * slope, dy * gate * factor


def backward_by_torch(dy: Tensor, gate: Tensor, up: Tensor, act: str = "silu") -> tuple[Tensor, Tensor]:
    """What autograd runs."""
    if act == "silu":
        return torch.ops.aten.silu_backward(dy * up, gate), dy * F.silu(gate)
    return torch.ops.aten.gelu_backward(dy * up, gate, approximate=act), dy * F.gelu(gate, approximate=act)


def packed_backward_by_torch(dy: Tensor, x: Tensor, *act: str) -> Tensor:
    return torch.cat(backward_by_torch(dy, *split(x, None), *act), -1)
