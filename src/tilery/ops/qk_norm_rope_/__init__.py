from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilery.base.errors import require
from tilery.base.spec import Bucket, Case, Cost, TensorSpec, case, dtype_name
from tilery.core import inputs as random
from tilery.core.op import op
from tilery.core.peers import Compiled, baselines
from tilery.parts import heads, norms, rope_peers


def check(
    q: TensorSpec, k: TensorSpec, q_weight: TensorSpec, k_weight: TensorSpec, cos: TensorSpec, sin: TensorSpec,
    positions: TensorSpec | None, layout: str, interleaved: bool,
) -> None:  # fmt: skip
    heads.check(q, k, cos, sin, positions, layout)
    size = q.shape[-1]
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        require(weight.shape == (size,), f"{name} must be [{size}] as heads are, got {list(weight.shape)}")
        require(weight.stride(0) == 1, f"{name} must be contiguous, got stride {weight.stride(0)}")
        require(
            weight.dtype == q.dtype, f"{name} must be {dtype_name(q.dtype)} as q is, got {dtype_name(weight.dtype)}"
        )


def cost(q: TensorSpec, k: TensorSpec, q_weight: TensorSpec, k_weight: TensorSpec, cos: TensorSpec, *rest: Any) -> Cost:
    _, positions, layout, _ = rest
    turn = heads.cost(q, k, cos, positions, layout, in_place=False)  # the norm touches every value
    values = (q.nbytes + k.nbytes) // q.dtype.itemsize
    return Cost(turn.flops + 4 * values, turn.reads + q_weight.nbytes + k_weight.nbytes, turn.writes)


def bucket(q: TensorSpec, k: TensorSpec, q_weight: Any, k_weight: Any, cos: TensorSpec, *rest: Any) -> Bucket:
    _, _, layout, interleaved = rest
    return heads.bucket(q, k, cos, layout, interleaved)


_draw = heads.draw  # a case's `heads` hides the module


def inputs(
    m: int, heads: int = 3, kv_heads: int = 2, n: int = 16, dtype: str = "bf16", batch: int = 1, rotary: int = 0,
    order: str = "bshd", places: str = "none", angles: str = "fp32", interleaved: bool = False,
    layout: str = "contiguous", special: str = "none", eps: float = 1e-6, offset: float = 0.0,
    device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    drawn = _draw(
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
        *heads.cases(),
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
        x.copy_(rope_peers.turned(normed, cos, sin, positions, layout, interleaved))


@op(
    check=check, outputs=lambda *specs: (), cost=cost, bucket=bucket, inputs=inputs, allowed=heads.ALLOWED,
    mutates=("q", "k"), runtime=("eps", "offset"), check_runtime=norms.check_eps,
    kernels=("numba", "triton"), model_sizes=heads.model_sizes,
    baselines=baselines(torch=_torch, compile=Compiled(_torch)),
    indices=lambda q, k, q_weight, k_weight, cos, sin, positions, *how: heads.look_at_positions(cos, positions),
    cases={"test": _cases(), **heads.bench_cases()},
)  # fmt: skip
def qk_norm_rope_(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None,
    eps: float = 1e-6, offset: float = 0.0, layout: str = "bshd", interleaved: bool = False,
) -> None:  # fmt: skip
    """In place: each head of q and k becomes x / sqrt(mean(x²) + eps) · (weight + offset), then rope(·); weights [D].

    The other arguments are rope's. Nothing is rounded between the norm and the turn.
    """
    for x, weight in ((q, q_weight), (k, k_weight)):
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (weight + offset)
        x.copy_(heads.turned(normed, cos, sin, positions, layout, interleaved))
