import functools
from typing import Any

import torch
from torch import Tensor

from tilery.base.spec import Bucket, Cost, TensorSpec
from tilery.core.op import op
from tilery.core.peers import Compiled, baselines
from tilery.ops.rope_backward import outputs, rope_backward
from tilery.parts import heads, rope_peers


def check(
    q: TensorSpec, k: TensorSpec, cos: TensorSpec, sin: TensorSpec, positions: TensorSpec | None,
    layout: str, interleaved: bool,
) -> None:  # fmt: skip
    heads.check(q, k, cos, sin, positions, layout)


def cost(q: TensorSpec, k: TensorSpec, cos: TensorSpec, sin: TensorSpec, positions: Any, layout: str, *_: bool) -> Cost:
    return heads.cost(q, k, cos, positions, layout, in_place=False)


def bucket(q: TensorSpec, k: TensorSpec, cos: TensorSpec, sin: Any, positions: Any, layout: str, *how: bool) -> Bucket:
    return heads.bucket(q, k, cos, layout, how[0])


@functools.wraps(heads.draw)
def inputs(**params: Any) -> dict[str, Any]:
    drawn = heads.draw(**params)
    del drawn["v"]
    return drawn


def _backward(args: tuple[Any, ...], outs: tuple[Tensor, ...], grads: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
    q, k, cos, sin, positions, layout, interleaved = args
    dq, dk = (torch.zeros_like(x) if g is None else g for x, g in zip((q, k), grads))
    angles: tuple[Tensor | None, Tensor | None] = (None, None)
    if cos.requires_grad or sin.requires_grad:
        angles = heads.angle_gradients(((q, dq), (k, dk)), cos, positions, layout, interleaved)
    return *rope_backward(dq, dk, cos, sin, positions, layout, interleaved), *angles, None, None, None


@op(
    check=check, outputs=outputs, cost=cost, bucket=bucket, inputs=inputs, allowed=heads.ALLOWED, backward=_backward,
    kernels=("numba", "triton", "cutile"), model_sizes=heads.model_sizes,
    baselines=baselines(
        torch=rope_peers.rope, compile=Compiled(rope_peers.rope),
        liger=rope_peers.cloned(rope_peers.liger_), tilegym=rope_peers.cloned(rope_peers.tilegym_),
    ),
    indices=lambda q, k, cos, sin, positions, *how: heads.look_at_positions(cos, positions),
    cases={"test": heads.cases(), **heads.bench_cases()},
)  # fmt: skip
def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None,
    layout: str = "bshd", interleaved: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rotary position embedding of q and k: (a, b) becomes (a cos - b sin, b cos + a sin); cos, sin [P, R / 2], R ≤ D.

    q, k are [B, S, H, D] (layout "bshd"), [B, H, S, D] ("bhsd") or [T, H, D] ("thd"), each with its own H. positions
    [B, S] or [T] say which rows of cos and sin a token takes: 0 to S - 1 if None; one outside of 0 to P - 1 gives NaN.
    Hugging Face's tables have both halves alike: of its cos [1, S, R] pass cos[0, :, : R // 2].
    """
    q_out, k_out = (heads.turned(x, cos, sin, positions, layout, interleaved) for x in (q, k))
    return q_out, k_out
