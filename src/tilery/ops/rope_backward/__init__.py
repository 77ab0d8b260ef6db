import functools
from typing import Any

from torch import Tensor

from tilery.base.spec import Bucket, Cost, TensorSpec
from tilery.core.op import op
from tilery.core.peers import Compiled, baselines
from tilery.parts import heads, rope_peers


def check(
    dq: TensorSpec, dk: TensorSpec, cos: TensorSpec, sin: TensorSpec, positions: TensorSpec | None,
    layout: str, interleaved: bool,
) -> None:  # fmt: skip
    heads.check(dq, dk, cos, sin, positions, layout)


def outputs(q: TensorSpec, k: TensorSpec, *_: Any) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec.contiguous(x.shape, x.dtype, x.device) for x in (q, k))


def cost(dq: TensorSpec, dk: TensorSpec, cos: TensorSpec, sin: Any, positions: Any, layout: str, *_: bool) -> Cost:
    return heads.cost(dq, dk, cos, positions, layout, in_place=False)


def bucket(
    dq: TensorSpec, dk: TensorSpec, cos: TensorSpec, sin: Any, positions: Any, layout: str, *how: bool
) -> Bucket:
    return heads.bucket(dq, dk, cos, layout, how[0])


@functools.wraps(heads.draw)
def inputs(**params: Any) -> dict[str, Any]:
    drawn = heads.draw(**params)
    del drawn["v"]
    return {"dq": drawn.pop("q"), "dk": drawn.pop("k"), **drawn}


def _torch(dq: Tensor, dk: Tensor, cos: Tensor, sin: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    return rope_peers.rope(dq, dk, cos, -sin, *how)


@op(
    check=check, outputs=outputs, cost=cost, bucket=bucket, inputs=inputs, allowed=heads.ALLOWED,
    kernels=("numba", "triton"), model_sizes=heads.model_sizes,
    baselines=baselines(torch=_torch, compile=Compiled(_torch)),
    indices=lambda dq, dk, cos, sin, positions, *how: heads.look_at_positions(cos, positions),
    cases={
        "test": [c for c in heads.cases() if "layout" not in c.params and "special" not in c.params],
        **heads.bench_cases(),
    },
)  # fmt: skip
def rope_backward(
    dq: Tensor, dk: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None,
    layout: str = "bshd", interleaved: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of rope's q and k: a turn by the inverse angle; arguments as rope's."""
    dq_in, dk_in = (heads.turned(x, cos, sin, positions, layout, interleaved, inverse=True) for x in (dq, dk))
    return dq_in, dk_in
