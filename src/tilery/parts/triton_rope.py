"""Triton kernels that turn heads: a program takes one token and a few of its heads, of q or of k."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from tilery.base.spec import Artifact, TensorSpec
from tilery.hardware.device import ARCHS
from tilery.languages import triton_glue
from tilery.languages.triton_glue import hand_over, take_over
from tilery.parts.heads import heads

archs = ARCHS

_WARPS = (1, 2, 4, 8)
_VALUES_PER_LANE = 128  # of 255 registers; the rest hold cos, sin and addresses


@dataclass(frozen=True)
class Config:
    heads: int  # of one program
    num_warps: int


def refusal(q: TensorSpec, config: Config | None) -> str | None:
    warps = config.num_warps if config else _WARPS[-1]
    if config and (config.heads < 1 or config.heads & (config.heads - 1)):
        return f"heads must be a power of two, got {config.heads}"
    if warps not in _WARPS:
        return f"num_warps must be one of {', '.join(map(str, _WARPS))}, got {warps}"
    wide, most = triton.next_power_of_2(q.shape[-1]), 32 * warps * _VALUES_PER_LANE
    if (config.heads if config else 1) * wide > most:
        return f"heads of {q.shape[-1]} do not fit the registers of one program ({most} values)"
    return None


def default(q: TensorSpec, k: TensorSpec, layout: str) -> Config:
    """16 values a thread where there are few tokens, so that a step of decoding is short; else 32 in fewer programs."""
    shape = heads(q, layout)
    few = shape.batch * shape.tokens * shape.heads * shape.size < 2**20
    return _cut(q, k, layout, *((2048, 16) if few else (4096, 32)))


def configs(q: TensorSpec, k: TensorSpec, layout: str) -> list[Config]:
    cuts = ((1024, 16), (1024, 32), (2048, 16), (2048, 32), (4096, 16), (4096, 32), (8192, 32))
    found = dict.fromkeys(_cut(q, k, layout, values, each) for values, each in cuts)
    return [c for c in found if refusal(q, c) is None]


def _cut(q: TensorSpec, k: TensorSpec, layout: str, values: int, per_thread: int) -> Config:
    wide = triton.next_power_of_2(q.shape[-1])
    most = triton.next_power_of_2(max(heads(q, layout).heads, heads(k, layout).heads, 1))
    count = min(max(values // wide, 1), most)
    # With two threads for a value of cos and more, all of them load it; with fewer it goes through shared memory.
    return Config(count, min(max(count * wide // (32 * per_thread), wide // 32, 1), _WARPS[-1]))


# Pieces of kernels


@triton.jit
def load_pairs(starts, mask, HALF: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The first and the second of every pair, fp32 [heads, BLOCK]; starts and mask are [heads, 1]."""
    if INTERLEAVED:
        cols = tl.arange(0, 2 * BLOCK)[None, :]
        x = tl.load(starts + cols, mask=mask & (cols < 2 * HALF), other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(x, (x.shape[0], BLOCK, 2)))
    else:
        cols = tl.arange(0, BLOCK)[None, :]
        a = tl.load(starts + cols, mask=mask & (cols < HALF), other=0.0).to(tl.float32)
        b = tl.load(starts + HALF + cols, mask=mask & (cols < HALF), other=0.0).to(tl.float32)
    return a, b


@triton.jit
def store_pairs(starts, mask, a, b, HALF: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    if INTERLEAVED:
        cols = tl.arange(0, 2 * BLOCK)[None, :]
        both = tl.reshape(tl.join(a, b), (a.shape[0], 2 * BLOCK))
        tl.store(starts + cols, both, mask=mask & (cols < 2 * HALF))
    else:
        cols = tl.arange(0, BLOCK)[None, :]
        tl.store(starts + cols, a, mask=mask & (cols < HALF))
        tl.store(starts + HALF + cols, b, mask=mask & (cols < HALF))


@triton.jit
def load_angles(
    cos_ptr, sin_ptr, position, table, cos_stride, sin_stride,
    HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """cos and sin [1, BLOCK] of a position; NaN for one that is not in the table."""
    cols = tl.arange(0, BLOCK)
    mask = (cols < HALF) & (position >= 0) & (position < table)
    cos = tl.load(cos_ptr + position * cos_stride + cols, mask=mask, other=float("nan")).to(tl.float32)
    sin = tl.load(sin_ptr + position * sin_stride + cols, mask=mask, other=float("nan")).to(tl.float32)
    return cos[None, :], sin[None, :]


@triton.jit
def turn(
    x_ptr, y_ptr, w_ptr, cos, sin, first, x_head, y_head, eps, offset,
    COUNT: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
    BLOCK: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """HEADS heads of one token from `first` on, normed first if there is a weight."""
    head = (first + tl.arange(0, HEADS))[:, None].to(tl.int64)
    mask = head < COUNT
    x, y = x_ptr + head * x_head, y_ptr + head * y_head
    a, b = load_pairs(x, mask, HALF, BLOCK, INTERLEAVED)
    if REST:
        cols = 2 * HALF + tl.arange(0, REST)[None, :]
        rest = tl.load(x + cols, mask=mask & (cols < SIZE), other=0.0).to(tl.float32)
    if w_ptr is not None:
        every = tl.full((1, 1), 1, tl.int1)
        w_a, w_b = load_pairs(w_ptr + tl.zeros((1, 1), tl.int32), every, HALF, BLOCK, INTERLEAVED)  # before sums wait
        squares = tl.sum(a * a + b * b, axis=1)
        if REST:
            squares += tl.sum(rest * rest, axis=1)
        scale = tl.rsqrt(squares / SIZE + eps)[:, None]
        a, b = a * scale * (w_a + offset), b * scale * (w_b + offset)
        if REST:
            w_rest = tl.load(w_ptr + cols, mask=cols < SIZE, other=0.0).to(tl.float32)
            rest = rest * scale * (w_rest + offset)
    if REST:
        tl.store(y + cols, rest, mask=mask & (cols < SIZE))
    store_pairs(y, mask, a * cos - b * sin, b * cos + a * sin, HALF, BLOCK, INTERLEAVED)


@triton_glue.early
@triton.jit(do_not_specialize=("tokens", "table"))  # they change from call to call
def _rope(
    q_ptr, k_ptr, cos_ptr, sin_ptr, positions_ptr, q_weight_ptr, k_weight_ptr,
    q_out_ptr, k_out_ptr,
    tokens, table, q_batch, q_token, q_head, k_batch, k_token, k_head,
    q_out_batch, q_out_token, q_out_head, k_out_batch, k_out_token, k_out_head, cos_stride, sin_stride, eps, offset,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
    BLOCK: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    take_over()
    hand_over()
    Q_BLOCKS: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    BLOCKS: tl.constexpr = Q_BLOCKS + (K_HEADS + HEADS - 1) // HEADS
    token = tl.program_id(0) // BLOCKS
    block = tl.program_id(0) % BLOCKS
    batch = (token // tokens).to(tl.int64)  # int64: offsets pass 2**31
    place = (token % tokens).to(tl.int64)
    position = place
    if positions_ptr is not None:
        position = tl.load(positions_ptr + token).to(tl.int64)
    cos, sin = load_angles(cos_ptr, sin_ptr, position, table, cos_stride, sin_stride, HALF, BLOCK)
    if INVERSE:
        sin = -sin
    if block < Q_BLOCKS:
        turn(
            q_ptr + batch * q_batch + place * q_token, q_out_ptr + batch * q_out_batch + place * q_out_token,
            q_weight_ptr, cos, sin, block * HEADS, q_head, q_out_head, eps, offset,
            Q_HEADS, SIZE, HALF, HEADS, BLOCK, REST, INTERLEAVED,
        )  # fmt: skip
    else:
        turn(
            k_ptr + batch * k_batch + place * k_token, k_out_ptr + batch * k_out_batch + place * k_out_token,
            k_weight_ptr, cos, sin, (block - Q_BLOCKS) * HEADS, k_head, k_out_head, eps, offset,
            K_HEADS, SIZE, HALF, HEADS, BLOCK, REST, INTERLEAVED,
        )  # fmt: skip


def rest(size: int, half: int) -> int:
    """The block that holds the values of a head that are not turned."""
    return triton.next_power_of_2(size - 2 * half) if size > 2 * half else 0


class Launch(NamedTuple):
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    options: dict[str, int]
    grid: tuple[int]

    def run(self) -> None:
        triton_glue.legacy_launch(_rope, self.grid, self.arguments, self.constants, self.options)

    def compile(self, arch: str) -> Artifact:
        return triton_glue.legacy_compile(_rope, self.arguments, self.constants, self.options, arch)


class Norm(NamedTuple):
    """What heads are normed with before they are turned."""

    q_weight: Any = None
    k_weight: Any = None
    eps: float = 0.0
    offset: float = 0.0


NO_NORM = Norm()


def launch(config: Config, outs: Any, args: Any, inverse: bool = False, norm: Norm = NO_NORM) -> Launch:
    """Of tensors for a run and of specs for a compile; args are rope's, outs None where it is in place."""
    q, k, cos, sin, positions, layout, interleaved = args
    q_out, k_out = outs or (q, k)
    q_as, k_as, half = heads(q, layout), heads(k, layout), cos.shape[1]
    others = (q_as, k_as) if outs is None else (heads(q_out, layout), heads(k_out, layout))
    strides = [stride for x in (q_as, k_as, *others) for stride in x.strides]
    arguments = (
        q, k, cos, sin, positions, norm.q_weight, norm.k_weight, q_out, k_out,
        q_as.tokens, cos.shape[0], *strides, cos.stride(0), sin.stride(0), float(norm.eps), float(norm.offset),
    )  # fmt: skip
    whole = outs is not None or norm.q_weight is not None  # else what is not turned stays where it is
    constants = {
        "Q_HEADS": q_as.heads, "K_HEADS": k_as.heads, "SIZE": q_as.size, "HALF": half, "HEADS": config.heads,
        "BLOCK": triton.next_power_of_2(half), "REST": rest(q_as.size, half) if whole else 0,
        "INTERLEAVED": interleaved, "INVERSE": inverse,
    }  # fmt: skip
    blocks = triton.cdiv(q_as.heads, config.heads) + triton.cdiv(k_as.heads, config.heads)
    return Launch(arguments, constants, {"num_warps": config.num_warps}, (q_as.batch * q_as.tokens * blocks,))
