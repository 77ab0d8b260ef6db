"""Contract of qk_norm_rope_."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilery.base.errors import require
from tilery.base.spec import Case, Cost, case, dtype_name
from tilery.core import inputs as random
from tilery.core.op import op
from tilery.core.peers import Compiled, baselines
from tilery.ops.norms.contract import check_eps
from tilery.ops.rope import contract, peers
from tilery.ops.rope.call import RopeCall
from tilery.ops.rope.heads import model_sizes


def _check(call: RopeCall) -> None:
    contract.check(call)
    size, dtype = call.q.shape[-1], call.q.dtype
    for name, weight in (("q_weight", call.q_weight), ("k_weight", call.k_weight)):
        require(weight.shape == (size,), f"{name} must be [{size}] as heads are, got {list(weight.shape)}")
        require(weight.stride(0) == 1, f"{name} must be contiguous, got stride {weight.stride(0)}")
        require(weight.dtype == dtype, f"{name} must be {dtype_name(dtype)} as q is, got {dtype_name(weight.dtype)}")


def _cost(call: RopeCall) -> Cost:
    rotation = contract.cost(call)  # not that in place: the norm touches every value
    values = (call.q.nbytes + call.k.nbytes) // call.q.dtype.itemsize
    reads = rotation.reads + call.q_weight.nbytes + call.k_weight.nbytes
    return Cost(rotation.flops + 4 * values, reads, rotation.writes)


def _inputs(
    m: int, heads: int = 3, kv_heads: int = 2, n: int = 16, dtype: str = "bf16", batch: int = 1, rotary: int = 0,
    order: str = "bshd", places: str = "none", angles: str = "fp32", interleaved: bool = False,
    layout: str = "contiguous", special: str = "none", eps: float = 1e-6, offset: float = 0.0,
    device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    drawn = contract.draw(
        m, heads, kv_heads, n, dtype, batch, rotary, order, places, angles, interleaved, layout, special, device, seed
    )
    del drawn["v"]
    g = random.generator(seed + 1, drawn["q"].device)
    for name in ("q_weight", "k_weight"):
        drawn[name] = random.vector(n, dtype, g)
    return drawn | {"eps": eps, "offset": offset}


def _cases() -> list[Case]:
    more: dict[str, Any] = {"m": 3, "heads": 3, "kv_heads": 2, "n": 64}
    return [
        *contract.cases(),
        case(**more, dtype="fp32", eps=0.5, offset=1.0),
        case(**more, dtype="fp16", eps=0.0, rotary=32, interleaved=True),
        case(**more, dtype="bf16", eps=2.0, offset=-0.5, rotary=32),
    ]


def _torch(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None,
    eps: float, offset: float, layout: str, interleaved: bool,
) -> None:  # fmt: skip
    for x, weight in ((q, q_weight), (k, k_weight)):
        normed = F.rms_norm(x, weight.shape, weight + offset if offset else weight, eps)
        x.copy_(peers.rotated(normed, cos, sin, positions, layout, interleaved))


@op(
    check=_check, outputs=lambda call: {}, cost=_cost, bucket=contract.bucket, inputs=_inputs,
    allowed=contract.ALLOWED, call_type=RopeCall,
    mutates=("q", "k"), runtime=("eps", "offset"), check_runtime=check_eps,
    kernels={"numba": "numba_kernels:qk_norm_rope_", "triton": "triton_kernels:qk_norm_rope_"},
    model_sizes=model_sizes, baselines=baselines(torch=_torch, compile=Compiled(_torch)),
    indices=contract.check_positions,
    cases={"test": _cases(), **contract.bench_cases()},
)  # fmt: skip
def qk_norm_rope_(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None,
    eps: float = 1e-6, offset: float = 0.0, layout: str = "bshd", interleaved: bool = False,
) -> None:  # fmt: skip
    """In place: each head of q and k becomes x / sqrt(mean(x²) + eps) · (weight + offset), then rope(·); weights [D].

    The other arguments are rope's. Nothing is rounded between the norm and the rotation.
    """
    for x, weight in ((q, q_weight), (k, k_weight)):
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (weight + offset)
        x.copy_(contract.rotated(normed, cos, sin, positions, layout, interleaved))
