from typing import Any

from torch import Tensor

from tilery.base.spec import Cost, TensorSpec
from tilery.core.op import op
from tilery.core.peers import Compiled, baselines
from tilery.ops.rope import bucket, check, inputs
from tilery.parts import heads, rope_peers


def cost(q: TensorSpec, k: TensorSpec, cos: TensorSpec, sin: TensorSpec, positions: Any, layout: str, *_: bool) -> Cost:
    return heads.cost(q, k, cos, positions, layout, in_place=True)


@op(
    check=check, outputs=lambda *specs: (), cost=cost, bucket=bucket, inputs=inputs, allowed=heads.ALLOWED,
    mutates=("q", "k"), kernels=("numba", "triton"), model_sizes=heads.model_sizes,
    baselines=baselines(
        torch=rope_peers.rope_, compile=Compiled(rope_peers.rope_),
        liger=rope_peers.liger_, tilegym=rope_peers.tilegym_,
    ),
    indices=lambda q, k, cos, sin, positions, *how: heads.look_at_positions(cos, positions),
    cases={"test": heads.cases(), **heads.bench_cases()},
)  # fmt: skip
def rope_(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None,
    layout: str = "bshd", interleaved: bool = False,
) -> None:  # fmt: skip
    """rope in place: q and k, which may be views of one tensor, are overwritten; arguments as rope's."""
    for x in (q, k):
        x.copy_(heads.turned(x, cos, sin, positions, layout, interleaved))
