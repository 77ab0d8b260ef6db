"""Contract of moe_align."""

from typing import Any

import torch
from torch import Tensor

from tilery.base.errors import require
from tilery.base.spec import Bucket, Cost, TensorSpec, case
from tilery.core import inputs as draw
from tilery.core.call import Call
from tilery.core.op import op
from tilery.core.peers import baselines
from tilery.ops.moe import contract
from tilery.ops.moe.call import aligned_specs, most_blocks

_MOST_EXPERTS = 1024
_MOST_SLOTS = 2**31 - 1


def _check(call: Call) -> None:
    contract.check_ids(call.ids, call.expert_map)
    require(
        1 <= call.experts <= _MOST_EXPERTS,
        f"experts must be 1 to {_MOST_EXPERTS}, the number of experts that are here, got {call.experts}",
    )
    require(call.block >= 1, f"block must be 1 or more, got {call.block}")
    slots = most_blocks(call.ids.shape[0] * call.ids.shape[1], call.experts, call.block) * call.block
    require(slots <= _MOST_SLOTS, f"ids and block must give at most {_MOST_SLOTS} slots, got {slots}")


def _outputs(call: Call) -> dict[str, TensorSpec]:
    return aligned_specs(call.ids, call.experts, call.block)


def _cost(call: Call) -> Cost:
    known = call.expert_map.nbytes if call.expert_map is not None else 0
    return Cost(0, call.ids.nbytes + known, sum(x.nbytes for x in _outputs(call).values()))


def _bucket(call: Call) -> Bucket:
    where = ",map" if call.expert_map is not None else ""
    return Bucket(
        exact=f"experts={call.experts},k={call.ids.shape[1]},block={call.block}{where}",
        scaled={"m": call.ids.shape[0]},
    )


def _inputs(
    m: int, topk: int, experts: int, block: int = 1, away: int = 0, spread: str = "random", outside: bool = False,
    dtype: str = "int32", device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """`away`: experts of other ranks, beside those that are here. Ids have one dtype alone."""
    require(dtype == "int32", f"dtype must be int32, got {dtype!r}")
    g = draw.generator(seed, device)
    ids = contract.draw_ids(m, topk, experts + away, spread, outside, g)
    return {"ids": ids, "expert_map": contract.draw_map(experts, away, g), "experts": experts, "block": block}


def _aligned(ids: Tensor, expert_map: Tensor | None, experts: int, block: int) -> Any:
    """In torch, without waiting for the device."""
    local, where = contract.local_experts(ids, expert_map, experts).flatten(), ids.device
    assignments, blocks = len(local), most_blocks(len(local), experts, block)
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=where).index_add(0, local, torch.ones_like(local))
    padded = (counts[:experts] + block - 1) // block * block
    ends = padded.cumsum(0)
    offsets = torch.cat((ends.new_zeros(1), ends))
    before = counts.cumsum(0) - counts  # assignments of earlier experts
    sources = local.argsort(stable=True)
    expert = local[sources]
    slots = torch.arange(assignments, device=where) - before[expert] + offsets[expert]
    here, last = expert < experts, blocks * block  # what is not here is written to one slot more
    order = torch.full((last + 1,), assignments, device=where)
    order = order.scatter(0, torch.where(here, slots, last), torch.where(here, sources, assignments))[:last]
    inverse = torch.empty_like(local).scatter(0, sources, torch.where(here, slots, -1)).view(ids.shape)
    of_block = torch.searchsorted(ends, torch.arange(blocks, device=where) * block, right=True)
    of_block = torch.where(of_block < experts, of_block, -1)
    return tuple(x.to(torch.int32) for x in (order, inverse, offsets, counts[:experts], of_block))


@op(
    check=_check, outputs=_outputs, cost=_cost, bucket=_bucket, inputs=_inputs, allowed={torch.int32: 0.0},
    kernels={"numba": "numba_align:moe_align", "triton": "triton_align:moe_align"},
    baselines=baselines(torch=_aligned), indices=lambda call: contract.check_indices(call, call.experts),
    model_sizes=lambda model: (
        [{"topk": model.num_experts_per_tok, "experts": model.n_routed_experts}] if model.n_routed_experts else []
    ),
    cases={
        "test": [
            case(m=40, topk=3, experts=7),
            case(m=40, topk=3, experts=7, block=16),
            case(m=3, topk=2, experts=60, block=16),  # most experts are empty
            case(m=300, topk=8, experts=128, block=64),
            case(m=700, topk=2, experts=8, block=5),  # more assignments than a program of Triton's looks at together
            case(m=33, topk=1, experts=5, block=16, spread="one"),  # all tokens on one expert
            case(m=50, topk=4, experts=4, block=32),  # all tokens on all experts
            case(m=1, topk=1, experts=1),
            case(m=1, topk=8, experts=64, block=16),
            case(m=0, topk=4, experts=6, block=16),  # no tokens
            case(m=40, topk=4, experts=8, away=24, block=16),
            case(m=5, topk=2, experts=3, away=40),
            case(m=30, topk=3, experts=9, block=16, outside=True),
            case(m=30, topk=3, experts=9, away=5, outside=True),
            case(m=9, topk=1, experts=1000, block=2),
        ],
        "bench": [
            *(case(m=m, topk=8, experts=128, block=16) for m in (1, 64)),
            case(m=4096, topk=8, experts=128, block=128),
            case(m=4096, topk=8, experts=32, away=224, block=128),
        ],
        "bench_cpu": [case(m=4096, topk=8, experts=128, block=16)],
    },
)  # fmt: skip
def moe_align(
    ids: Tensor, expert_map: Tensor | None, experts: int, block: int = 1
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Sorts assignments by expert: (order [P], inverse [T, k], offsets [E+1], counts [E], block_experts [P/block]).

    Assignment t·k + j is token t's j-th choice, the expert ids[t, j], one of E; with an int32 expert_map [G] it is
    expert_map[ids[t, j]], of G experts of which E are here. Ids and entries that are no expert's are not here. Expert e
    has the slots from offsets[e] on: its counts[e] assignments as they come, then free ones up to a multiple of block.
    order has the assignment in each slot, T·k where it is free; inverse has the slot of each assignment, -1 of one not
    here; block_experts has the expert of each block of slots, -1 past the last one. P, a multiple of block, is the most
    slots that there may be. All are int32.
    """
    order, inverse, offsets, counts, block_experts = _aligned(ids, expert_map, experts, block)
    return order, inverse, offsets, counts, block_experts
