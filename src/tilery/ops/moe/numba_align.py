"""moe_align in Numba: one thread counts, then places."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from tilery.base.launch import Launch
from tilery.base.spec import TensorSpec
from tilery.core.call import Call
from tilery.core.kernel import Kernel
from tilery.languages.numba_elements import integer, store_integer
from tilery.languages.numba_glue import jit, kernel
from tilery.ops.moe.call import ALIGNED


@jit
def local_expert(ids, expert_map, index, experts, known):
    """The expert of an assignment, -1 for one that is not here; `known`: entries of the map, -1 without one."""
    expert = integer(ids, index, 4)
    if known >= 0:
        expert = integer(expert_map, expert, 4) if 0 <= expert < known else np.int64(-1)
    return expert if 0 <= expert < experts else np.int64(-1)


@kernel
def _moe_align(threads, ids, expert_map, made, count, experts, known, block, blocks):
    """made: order, inverse, offsets, counts, block_experts."""
    order, inverse, offsets, counts, block_experts = made
    slots = np.empty(experts + 1, np.int64)  # of each expert the next one
    for expert in range(experts + 1):  # Numba would fill np.zeros by all threads, which a forked child does not have
        slots[expert] = 0
    for i in range(count):
        expert = local_expert(ids, expert_map, i, experts, known)
        if expert >= 0:
            slots[expert] += 1
    start = np.int64(0)
    for expert in range(experts):
        own, last = slots[expert], (start + slots[expert] + block - 1) // block
        store_integer(offsets, expert, start, 4)
        store_integer(counts, expert, own, 4)
        for place in range(start // block, last):
            store_integer(block_experts, place, expert, 4)
        for slot in range(start + own, last * block):
            store_integer(order, slot, count, 4)
        slots[expert], start = start, last * block
    store_integer(offsets, experts, start, 4)
    for place in range(start // block, blocks):
        store_integer(block_experts, place, -1, 4)
    for slot in range(start, blocks * block):
        store_integer(order, slot, count, 4)
    for i in range(count):
        expert, slot = local_expert(ids, expert_map, i, experts, known), np.int64(-1)
        if expert >= 0:
            slot = slots[expert]
            slots[expert] += 1
            store_integer(order, slot, i, 4)
        store_integer(inverse, i, slot, 4)


@dataclass(frozen=True)
class Config:
    """Nothing to choose: each place depends on those before."""


def align_launch(ids: TensorSpec, expert_map: TensorSpec | None, made: dict[str, Any], block: int) -> Launch:
    """The launch that fills `made`, tensors by the names of moe_align's outputs."""
    args = {
        "ids": ids, "expert_map": ids if expert_map is None else expert_map,
        "made": tuple(made[name] for name in ALIGNED), "count": ids.shape[0] * ids.shape[1],
        "experts": made["counts"].shape[0], "known": -1 if expert_map is None else expert_map.shape[0],
        "block": block, "blocks": made["block_experts"].shape[0],
    }  # fmt: skip
    return Launch(_moe_align, 1, args, options={"parallel": False})


class MoeAlign(Kernel):
    archs = ("cpu",)
    Config = Config

    def default(self, call: Call) -> Config:
        return Config()

    def launches(self, call: Call, config: Config) -> list[Launch]:
        made = {name: getattr(call, name) for name in ALIGNED}
        return [align_launch(call.ids, call.expert_map, made, call.block)]


moe_align = MoeAlign()
