"""Contracts of rope, rope_ (in place) and rope_backward."""

import functools
from typing import Any

import torch
from torch import Tensor

from tilery.base.spec import TensorSpec
from tilery.core.call import Call
from tilery.core.op import op
from tilery.core.peers import Compiled, baselines
from tilery.ops.rope import contract, peers
from tilery.ops.rope.call import RopeCall
from tilery.ops.rope.heads import model_sizes
from tilery.ops.rows.contract import like

# Backward


class RopeBackwardCall(RopeCall):
    """q and k, which are rotated, are gradients here."""

    @property
    def q(self) -> Any:
        return self.dq

    @property
    def k(self) -> Any:
        return self.dk

    @property
    def q_out(self) -> Any:
        return self.dq_in

    @property
    def k_out(self) -> Any:
        return self.dk_in


def _backward_outputs(call: RopeCall) -> dict[str, TensorSpec]:
    return {"dq_in": like(call.q), "dk_in": like(call.k)}


@functools.wraps(contract.draw)
def _backward_inputs(**params: Any) -> dict[str, Any]:
    drawn = contract.draw(**params)
    del drawn["v"]
    return {"dq": drawn.pop("q"), "dk": drawn.pop("k"), **drawn}


def _torch_backward(dq: Tensor, dk: Tensor, cos: Tensor, sin: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    return peers.rope(dq, dk, cos, -sin, *how)


@op(
    check=contract.check, outputs=_backward_outputs, cost=contract.cost, bucket=contract.bucket,
    inputs=_backward_inputs, allowed=contract.ALLOWED, call_type=RopeBackwardCall,
    kernels={"numba": "numba_kernels:rope_backward", "triton": "triton_kernels:rope_backward"},
    model_sizes=model_sizes, baselines=baselines(torch=_torch_backward, compile=Compiled(_torch_backward)),
    indices=contract.check_positions,
    cases={
        "test": [c for c in contract.cases() if "layout" not in c.params and "special" not in c.params],
        **contract.bench_cases(),
    },
)  # fmt: skip
def rope_backward(
    dq: Tensor, dk: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None,
    layout: str = "bshd", interleaved: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of rope's q and k: a rotation by the inverse angle; arguments as rope's."""
    dq_in, dk_in = (contract.rotated(x, cos, sin, positions, layout, interleaved, inverse=True) for x in (dq, dk))
    return dq_in, dk_in


# Forward


def _outputs(call: RopeCall) -> dict[str, TensorSpec]:
    return {"q_out": like(call.q), "k_out": like(call.k)}


@functools.wraps(contract.draw)
def _inputs(**params: Any) -> dict[str, Any]:
    drawn = contract.draw(**params)
    del drawn["v"]
    return drawn


def _backward(call: RopeCall, grads: Call) -> dict[str, Tensor]:
    dq, dk = (torch.zeros_like(x) if g is None else g for x, g in ((call.q, grads.q_out), (call.k, grads.k_out)))
    dq_in, dk_in = rope_backward(dq, dk, call.cos, call.sin, call.positions, call.layout, call.interleaved)
    found = {"q": dq_in, "k": dk_in}
    if call.cos.requires_grad or call.sin.requires_grad:
        rotations = ((call.q, dq), (call.k, dk))
        found["cos"], found["sin"] = contract.angle_gradients(
            rotations, call.cos, call.positions, call.layout, call.interleaved
        )
    return found


@op(
    check=contract.check, outputs=_outputs, cost=contract.cost, bucket=contract.bucket, inputs=_inputs,
    allowed=contract.ALLOWED, call_type=RopeCall, backward=_backward,
    kernels={"numba": "numba_kernels:rope", "triton": "triton_kernels:rope", "cutile": "cutile_kernels:rope"},
    model_sizes=model_sizes,
    baselines=baselines(
        torch=peers.rope, compile=Compiled(peers.rope),
        liger=peers.cloned(peers.liger_), tilegym=peers.cloned(peers.tilegym_),
    ),
    indices=contract.check_positions,
    cases={"test": contract.cases(), **contract.bench_cases()},
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
    q_out, k_out = (contract.rotated(x, cos, sin, positions, layout, interleaved) for x in (q, k))
    return q_out, k_out


@op(
    check=contract.check, outputs=lambda call: {}, cost=contract.cost_in_place, bucket=contract.bucket, inputs=_inputs,
    allowed=contract.ALLOWED, call_type=RopeCall, mutates=("q", "k"),
    kernels={"numba": "numba_kernels:rope_", "triton": "triton_kernels:rope_"}, model_sizes=model_sizes,
    baselines=baselines(
        torch=peers.rope_, compile=Compiled(peers.rope_), liger=peers.liger_, tilegym=peers.tilegym_,
    ),
    indices=contract.check_positions,
    cases={"test": contract.cases(), **contract.bench_cases()},
)  # fmt: skip
def rope_(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None,
    layout: str = "bshd", interleaved: bool = False,
) -> None:  # fmt: skip
    """rope in place: q and k, which may be views of one tensor, are overwritten; arguments as rope's."""
    for x in (q, k):
        x.copy_(contract.rotated(x, cos, sin, positions, layout, interleaved))
