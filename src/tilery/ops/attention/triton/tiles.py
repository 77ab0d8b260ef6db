"""Tiles of queries and keys of whole sequences in Triton: how TMA loads them, which run together, packed sequences."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from tilery.base.integers import next_power_of_2
from tilery.base.launch import Argument
from tilery.base.spec import TensorSpec
from tilery.hardware.gpu import TMA, gpu
from tilery.languages.triton_glue import Descriptor
from tilery.ops.attention.call import AttentionCall
from tilery.ops.attention.triton.softmax import clamped_span

_BLOCKS = (16, 32, 64, 128, 256)  # `far` counts on it


@dataclass(frozen=True)
class Tiles:
    block_m: int  # queries
    block_n: int  # keys
    num_warps: int
    num_stages: int
    tma: bool = False  # keys and values come by TMA, which takes no registers

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


def size_refusal(config: Tiles) -> str | None:
    if any(size not in _BLOCKS for size in (config.block_m, config.block_n)):
        return f"blocks must be powers of two from 16 to 256, got {config}"
    return None


def shared_refusal(where: TensorSpec, config: object, need: int) -> str | None:
    limit = gpu(where.device).shared_per_block
    return f"{config} needs {need} bytes of shared memory, a block has {limit}" if need > limit else None


def tma_refusal(call: AttentionCall, what: str, *tensors: TensorSpec) -> str | None:
    """Why TMA cannot load from these tensors, which are called `what`; the interpreter takes it too."""
    device = gpu(call.q.device)
    if device.number < TMA:
        return f"TMA is there from sm_{TMA} on, this is {device.arch}"
    for x in tensors:
        _, strides = _matrices(call, x)
        if not all(x.shape):
            return "TMA takes no empty tensors"
        if not all(strides):
            return "TMA takes no heads or sequences that are one in memory"
        if not x.aligned or any(step * x.dtype.itemsize % 16 for step in strides):
            return f"TMA takes {what} that begin at multiples of 16 bytes"
    return None


def _matrices(call: AttentionCall, x: TensorSpec) -> tuple[tuple[int, int, int], tuple[int, ...]]:
    """Sizes and strides of a tensor along sequences, heads and tokens; where there is one alone any stride will do."""
    sequence, token, head = call.strides(x)
    dims = (None, 1, 0) if call.packed else (0, call.layout.index("h"), call.layout.index("s"))
    sequences, heads, tokens = (1 if dim is None else x.shape[dim] for dim in dims)
    shape = sequences, heads, tokens
    return shape, tuple(x.shape[-1] if n == 1 else step for n, step in zip(shape, (sequence, head, token)))


def descriptor(call: AttentionCall, x: Argument, tokens: int) -> Descriptor:
    """A descriptor of [sequence, head, token, value]: blocks of so many tokens and all values, zeros behind them."""
    shape, strides = _matrices(call, x)
    size = x.shape[-1]
    return Descriptor(x.view((*shape, size), (*strides, 1)), (1, 1, tokens, next_power_of_2(size)))


def heads_in_l2(call: AttentionCall) -> int:
    """Key heads whose keys and values fit the L2 together."""
    nbytes = max(call.keys, 1) * (call.head_dim + call.value_dim) * call.q.dtype.itemsize
    return max(gpu(call.q.device).l2_for_reuse // nbytes, 1)


def far(*strides: int) -> bool:
    """Whether offsets inside of a tile may pass 2**31 elements; those of the tile itself may always."""
    return max(strides) >= 2**23


@triton.jit
def scheduled(pairs, tiles, heads_together, CAUSAL: tl.constexpr):
    """The tile of this program, and its pair of a sequence and a head; tiles of so many heads run together."""
    before = tl.program_id(0) // (heads_together * tiles) * heads_together  # pairs whose tiles began before
    count = tl.minimum(pairs - before, heads_together)
    rest = tl.program_id(0) % (heads_together * tiles)
    tile, pair = rest // count, before + rest % count
    if CAUSAL:
        tile = tiles - 1 - tile  # those that see most keys first
    return tile, pair


@triton.jit
def load_rows(ptr, offsets, column, inside, COLUMNS: tl.constexpr):
    """Rows of a matrix that has so many columns, by their offsets from ptr; what is not there is 0."""
    mask = inside[:, None] & (column < COLUMNS)[None, :]
    return tl.load(ptr + (offsets[:, None] + column[None, :]), mask=mask, other=0.0)


# Packed sequences


class CuSeqlens(NamedTuple):
    """Ends of packed sequences, None where they are not packed."""

    q_ptr: Any
    k_ptr: Any


@triton.jit
def packed_span(cu_ptr, sequence, sequences, tokens, longest):
    """`clamped_span` of a sequence; one sequence more than there are has the tokens of no sequence."""
    first = tl.load(cu_ptr + sequence)
    last = tl.load(cu_ptr + sequence + 1, mask=sequence < sequences, other=tokens)
    return clamped_span(first, last, sequence, tokens, longest)


@triton.jit
def fill_rows(
    out_ptr, lse_ptr, first, last, step, row_stride, unused, VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the BLOCK rows from `first` on, and those of every `step` up to `last`, of a head.

    Zeros and an lse of -inf if they are `unused`, of no sequence; else NaN. WIDTH is a power of two from VALUE_DIM on.
    """
    column, nan = tl.arange(0, WIDTH), float("nan")
    for start in range(first, last, step):
        rows = start + tl.arange(0, BLOCK).to(tl.int64)
        inside = rows < last
        values = tl.zeros((BLOCK, WIDTH), tl.float32) + tl.where(unused, 0.0, nan)
        mask = inside[:, None] & (column < VALUE_DIM)[None, :]
        places = out_ptr + (rows[:, None] * row_stride + column[None, :])
        tl.store(places, values.to(out_ptr.dtype.element_ty), mask=mask)
        if lse_ptr is not None:
            sums = tl.zeros((BLOCK,), tl.float32) + tl.where(unused, -float("inf"), nan)
            tl.store(lse_ptr + rows, sums, mask=inside)
