"""Gated activations, y = act(gate) · up: what their ops share. `act` is silu, or tanh or none, as torch says for GELU.

Packed, gate and up are the halves of one tensor [..., 2H], as a fused projection writes them.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilery.base.errors import require
from tilery.base.spec import Bucket, Case, Cost, TensorSpec, case, dtype_name
from tilery.core import inputs as draw
from tilery.parts import rows

ALLOWED = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}
GELU = ("tanh", "none")

# GELU's tanh form is g · sigmoid(g · (LINEAR + CUBIC · g²)).
LINEAR = 2 * math.sqrt(2 / math.pi)
CUBIC = LINEAR * 0.044715
# The exact form: the normal distribution's tail beyond z ≥ 0 is exp(-z²/2) · P(t), t = 1 / (1 + RATE · z), where P has
# these coefficients from t on; fitted to a relative error of 6e-8 for z up to 14.5, past which fp32 holds 0.
RATE = 0.28
TAIL = (
    0.11168916483704153, 0.11196293961982448, 0.10115466101777926, 0.0912141526179711, 0.05526106765327426,
    0.01798701175227722, 0.0722432623820251, -0.08454310174454634, 0.02303086958891585,
)  # fmt: skip
DENSITY = 1 / math.sqrt(2 * math.pi)


def activated(g: Tensor, act: str) -> tuple[Tensor, Tensor]:
    """The reference: act(g) / g and act'(g)."""
    if act == "none":
        share = torch.erfc(-g * math.sqrt(0.5)) / 2
        return share, share + g * DENSITY * torch.exp(-g * g / 2)
    inner, inner_slope = (g, 1) if act == "silu" else (g * (LINEAR + CUBIC * g * g), LINEAR + 3 * CUBIC * g * g)
    share = torch.sigmoid(inner)
    return share, share * (1 + g * (1 - share) * inner_slope)


def halves(x: Any) -> tuple[Any, Any]:
    """gate and up of a packed tensor, or of its spec."""
    if isinstance(x, Tensor):
        gate, up = x.chunk(2, -1)
        return gate, up
    half = x.shape[-1] // 2
    spec = x._replace(shape=(*x.shape[:-1], half))
    return spec, spec._replace(aligned=x.aligned and half * x.dtype.itemsize % 16 == 0)


def pair(gate: Any, up: Any) -> tuple[Any, Any]:
    return halves(gate) if up is None else (gate, up)


def check_pair(name: str, gate: TensorSpec, up: TensorSpec | None) -> None:
    rows.check_rows(name, gate, ALLOWED)
    if up is None:
        n = gate.shape[-1]
        require(
            n % 2 == 0, f"{name} must be [..., 2H], gate and then up, where up is not given, got {list(gate.shape)}"
        )
        return
    rows.check_rows("up", up, ALLOWED)
    rows.check_like("up", up, name, gate)


def check_act(act: str) -> None:
    require(act in GELU, f"approximate must be one of {', '.join(GELU)}, got {act!r}")


# Forward: (gate, up, act)


def check(gate: TensorSpec, up: TensorSpec | None, act: str = "tanh") -> None:
    check_pair("gate", gate, up)
    check_act(act)


def outputs(gate: TensorSpec, up: TensorSpec | None, *act: str) -> tuple[TensorSpec, ...]:
    gate, _ = pair(gate, up)
    return (TensorSpec.contiguous(gate.shape, gate.dtype, gate.device),)


def cost(gate: TensorSpec, up: TensorSpec | None, act: str = "silu") -> Cost:
    gate, _ = pair(gate, up)
    # Negate, exp, add, divide, multiply; a cubic more for tanh, a polynomial of degree nine for none.
    return rows.cost_rows(gate, flops={"silu": 5, "tanh": 9, "none": 25}[act], reads=2)


def bucket(gate: TensorSpec, up: TensorSpec | None, *act: str) -> Bucket:
    m, n, _ = rows.rows(pair(gate, up)[0])
    exact = (f"n={n}", dtype_name(gate.dtype), *act, *(["packed"] if up is None else []))
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


def packed_cases(**more: Any) -> list[Case]:
    return [
        case(m=3, n=4096, dtype="fp32", packed=True, **more),
        case(m=3, n=127, dtype="bf16", packed=True, **more),  # up starts at an odd element
        case(m=9, n=1, dtype="fp16", packed=True, **more),
        case(m=0, n=128, dtype="fp32", packed=True, **more),
        case(m=2, n=96, dtype="fp16", batch=3, packed=True, **more),
        case(m=5, n=256, dtype="fp32", layout="misaligned", packed=True, **more),
        case(m=3, n=72, dtype="fp16", layout="far", packed=True, **more),
        case(m=3, n=200, dtype="fp32", special="nan", packed=True, **more),
    ]


def bench_cases(**more: Any) -> dict[str, list[Case]]:
    return {
        "bench": [
            case(m=m, n=14336, dtype="bf16", packed=packed, **more) for packed in (False, True) for m in (16, 8192)
        ],
        "bench_cpu": [case(m=2048, n=4096, dtype=dtype, **more) for dtype in ("fp32", "bf16")],
    }


# Backward: (dy, gate, up, act) -> (dgate, dup), and packed (dy, x, act) -> dx


def check_backward(dy: TensorSpec, gate: TensorSpec, up: TensorSpec, act: str = "tanh") -> None:
    check_pair("gate", gate, up)
    check_dy(dy, gate)
    check_act(act)


def check_packed_backward(dy: TensorSpec, x: TensorSpec, act: str = "tanh") -> None:
    check_pair("x", x, None)
    check_dy(dy, halves(x)[0])
    check_act(act)


def check_dy(dy: TensorSpec, gate: TensorSpec) -> None:
    rows.check_rows("dy", dy, ALLOWED)
    rows.check_like("dy", dy, "gate", gate)


def outputs_backward(dy: TensorSpec, gate: TensorSpec, up: TensorSpec, *act: str) -> tuple[TensorSpec, ...]:
    spec = TensorSpec.contiguous(gate.shape, gate.dtype, gate.device)
    return spec, spec


def outputs_packed_backward(dy: TensorSpec, x: TensorSpec, *act: str) -> tuple[TensorSpec, ...]:
    return (TensorSpec.contiguous(x.shape, x.dtype, x.device),)


def cost_backward(dy: TensorSpec, *_: Any) -> Cost:
    return rows.cost_rows(dy, flops=30 if "none" in _ else 15, reads=3, writes=2)


def bucket_backward(dy: TensorSpec, gate: TensorSpec, *rest: Any) -> Bucket:
    return bucket(dy, dy, *(scalar for scalar in rest if isinstance(scalar, str)))


def inputs_backward(
    m: int, n: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none", batch: int = 0,
    device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    dy = rows.draw(m, n, dtype, draw.generator(seed + 1, device), "contiguous", "none", batch)
    return {"dy": dy, **inputs(m, n, dtype, layout, special, batch, False, device, seed)}


def inputs_packed_backward(
    m: int, n: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none", batch: int = 0,
    device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    dy = rows.draw(m, n, dtype, draw.generator(seed + 1, device), "contiguous", "none", batch)
    return {"dy": dy, "x": inputs(m, n, dtype, layout, special, batch, True, device, seed)["gate"]}


def backward_cases(**more: Any) -> list[Case]:
    return [
        case(m=3, n=4096, dtype="fp32", **more),
        case(m=3, n=127, dtype="bf16", **more),
        case(m=5, n=1000, dtype="fp16", **more),
        case(m=9, n=1, dtype="fp32", **more),
        case(m=0, n=128, dtype="fp32", **more),
        case(m=2, n=96, dtype="fp16", batch=3, **more),
        case(m=5, n=257, dtype="bf16", layout="misaligned", **more),
        case(m=3, n=72, dtype="fp16", layout="far", **more),
        case(m=3, n=200, dtype="fp32", special="nan", **more),
        case(m=3, n=200, dtype="fp16", special="-inf", **more),
    ]


def exact_cases() -> list[Case]:
    """GELU without approximation."""
    return [
        case(m=3, n=1000, dtype="fp32", approximate="none"),
        case(m=3, n=127, dtype="bf16", approximate="none"),
        case(m=3, n=200, dtype="fp16", special="-inf", approximate="none"),
    ]


def backward_bench_cases(**more: Any) -> dict[str, list[Case]]:
    return {
        "bench": [case(m=m, n=14336, dtype="bf16", **more) for m in (16, 8192)],
        "bench_cpu": [case(m=2048, n=4096, dtype="fp32", **more)],
    }


def reference(gate: Tensor, up: Tensor | None, act: str) -> Tensor:
    gate, up = pair(gate, up)
    return gate * activated(gate, act)[0] * up


def reference_backward(dy: Tensor, gate: Tensor, up: Tensor, act: str) -> tuple[Tensor, Tensor]:
    share, slope = activated(gate, act)
    return dy * up * slope, dy * gate * share


def torch_backward(dy: Tensor, gate: Tensor, up: Tensor, act: str = "silu") -> tuple[Tensor, Tensor]:
    """What autograd runs."""
    if act == "silu":
        return torch.ops.aten.silu_backward(dy * up, gate), dy * F.silu(gate)
    return torch.ops.aten.gelu_backward(dy * up, gate, approximate=act), dy * F.gelu(gate, approximate=act)


def torch_packed_backward(dy: Tensor, x: Tensor, *act: str) -> Tensor:
    return torch.cat(torch_backward(dy, *halves(x), *act), -1)


def gradients(backward: Any, packed_backward: Any) -> Any:
    """A contract's `backward`, from the two ops that compute it."""

    def gradient(args: tuple[Any, ...], outs: Any, grads: tuple[Any, ...]) -> tuple[Any, ...]:
        gate, up, *act = args
        scalars = [None] * len(act)
        if up is None:
            return (packed_backward(grads[0], gate, *act), None, *scalars)
        return (*backward(grads[0], gate, up, *act), *scalars)

    return gradient
