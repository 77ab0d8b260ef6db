"""mla in CUDA C++ for Hopper: the kernel of attention.cu, which loads the columns of rope from tensors of their own.

A tile of Q or of K lies in shared memory as one: first the columns of q or k, in whole chunks of 64 with zeros behind,
then those of q_rope or k_rope. A block of values takes as much shared memory as one of keys.
"""

from typing import ClassVar

from tilery.languages.cuda_source import Source
from tilery.ops.attention.call import MlaCall
from tilery.ops.attention.cuda.forward import FILE, Attention, columns


class Mla(Attention):
    source = Source(FILE, "hopper_mla")
    # Queries and keys of a tile by the columns of Q and K, as attention has them. Which is best has not been measured.
    tiles: ClassVar = {128: ((128, 128), (128, 176)), 192: ((128, 112), (128, 128), (128, 96))}
    loaded = ("q", "q_rope", "k", "k_rope", "v")

    def width(self, call: MlaCall) -> int:
        return columns(call.q.shape[-1]) + columns(call.rope_dim)

    def _option_refusal(self, call: MlaCall) -> str | None:
        return None

    def _sizes(self, call: MlaCall) -> dict[str, int]:
        return {"ROPE_COL": columns(call.q.shape[-1]), "ROPE_DIM": call.rope_dim, "VALUE_DIM": call.value_dim}


mla = Mla()
