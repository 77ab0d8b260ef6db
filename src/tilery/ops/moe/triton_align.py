"""moe_align in Triton: a program per expert counts all assignments, then places its own."""

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from tilery.base.launch import Launch
from tilery.base.spec import TensorSpec
from tilery.core.call import Call
from tilery.core.kernel import Kernel
from tilery.hardware.gpu import ARCHS
from tilery.languages.triton_glue import pdl_wait
from tilery.ops.moe.call import ALIGNED


@triton.jit
def local_expert(ids_ptr, map_ptr, index, inside, E, G):
    """Experts of assignments, E for one that is not here. No id and no entry of the map is followed outside."""
    expert = tl.load(ids_ptr + index, mask=inside, other=-1)
    if map_ptr is not None:
        expert = tl.load(map_ptr + expert, mask=(expert >= 0) & (expert < G), other=-1)
    return tl.where((expert >= 0) & (expert < E), expert, E)


@triton.jit
def _fill(ptr, first, last, value, BLOCK: tl.constexpr):
    for start in range(first, last, BLOCK):
        places = start + tl.arange(0, BLOCK)
        tl.store(ptr + places, value, mask=places < last)


# A token more changes no code: lengths are not specialized on 1 and on multiples of 16.
@triton.jit(do_not_specialize=["A", "blocks"])
def _moe_align(
    ids_ptr, map_ptr, order_ptr, inverse_ptr, offsets_ptr, counts_ptr, blocks_ptr, A, E, G, blocks,
    PAD: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The last program, E, has the assignments that are not here and the slots past all. EXPERTS: from E + 1 on."""
    pdl_wait()
    own, experts, places = tl.program_id(0), tl.arange(0, EXPERTS), tl.arange(0, BLOCK)
    counts = tl.zeros((EXPERTS,), tl.int32)
    for first in range(0, A, BLOCK):
        inside = first + places < A
        counts += tl.histogram(local_expert(ids_ptr, map_ptr, first + places, inside, E, G), EXPERTS, mask=inside)
    padded = (counts + PAD - 1) // PAD * PAD
    start = tl.sum(tl.where(experts < own, padded, 0), axis=0)
    count = tl.sum(tl.where(experts == own, counts, 0), axis=0)
    slot = start
    if count > 0:
        for first in range(0, A, BLOCK):
            index = first + places
            hit = (local_expert(ids_ptr, map_ptr, index, index < A, E, G) == own) & (index < A)
            slots = slot + tl.cumsum(hit.to(tl.int32), 0) - 1
            tl.store(order_ptr + slots, index, mask=hit & (own < E))
            tl.store(inverse_ptr + index, tl.where(own < E, slots, -1), mask=hit)
            slot += tl.sum(hit.to(tl.int32), 0)
    last = (start + count + PAD - 1) // PAD
    if own == E:
        slot, last = start, blocks
    else:
        tl.store(counts_ptr + own, count)
    tl.store(offsets_ptr + own, start)
    _fill(order_ptr, slot, last * PAD, A, BLOCK)
    _fill(blocks_ptr, start // PAD, last, tl.where(own < E, own, -1), BLOCK)


@dataclass(frozen=True)
class Config:
    block: int  # assignments that a program looks at together
    num_warps: int


def align_launch(
    ids: TensorSpec, expert_map: TensorSpec | None, made: dict[str, Any], pad: int, config: Config
) -> Launch:
    """The launch that fills `made`, tensors by the names of moe_align's outputs."""
    assignments, experts = ids.shape[0] * ids.shape[1], made["counts"].shape[0]
    args = {
        "ids_ptr": ids, "map_ptr": expert_map, "order_ptr": made["order"], "inverse_ptr": made["inverse"],
        "offsets_ptr": made["offsets"], "counts_ptr": made["counts"], "blocks_ptr": made["block_experts"],
        "A": assignments, "E": experts, "G": expert_map.shape[0] if expert_map is not None else 0,
        "blocks": made["block_experts"].shape[0],
    }  # fmt: skip
    constants = {"PAD": pad, "EXPERTS": triton.next_power_of_2(experts + 1), "BLOCK": config.block}
    return Launch(_moe_align, experts + 1, args, constants, {"num_warps": config.num_warps}, pdl=True)


def align_config(assignments: int) -> Config:
    block = min(max(triton.next_power_of_2(assignments), 128), 1024)
    return Config(block, num_warps=4 if block <= 512 else 8)


class MoeAlign(Kernel):
    archs = ARCHS
    Config = Config

    def refusal(self, call: Call, config: Config | None = None) -> str | None:
        if config and (config.block < 32 or config.block & (config.block - 1)):
            return f"block must be a power of two from 32 on, got {config.block}"
        return None

    def default(self, call: Call) -> Config:
        return align_config(call.ids.shape[0] * call.ids.shape[1])

    def configs(self, call: Call) -> list[Config]:
        return [Config(block, warps) for block in (128, 512, 1024, 2048, 4096) for warps in (4, 8)]

    def launches(self, call: Call, config: Config) -> list[Launch]:
        made = {name: getattr(call, name) for name in ALIGNED}
        return [align_launch(call.ids, call.expert_map, made, call.block, config)]


moe_align = MoeAlign()
