"""Rotary ops in Triton: a program takes one token and a few of its heads, of q, k or v."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from tilery.base.launch import Launch
from tilery.core.kernel import Kernel
from tilery.hardware.gpu import ARCHS
from tilery.languages.triton_glue import pdl_launch_dependents, pdl_wait
from tilery.ops.quantize.triton_fp8 import as_bytes, native, quantize
from tilery.ops.rope import kv_cache
from tilery.ops.rope.call import CacheWriteCall, RopeCall, heads

_WARPS = (1, 2, 4, 8)
_VALUES_PER_LANE = 128  # of 255 registers; the rest hold cos, sin and addresses


@dataclass(frozen=True)
class Config:
    heads: int  # of one program
    num_warps: int


class RotaryKernel(Kernel):
    """How heads are dealt out to programs."""

    archs = ARCHS
    Config = Config

    def refusal(self, call: RopeCall, config: Config | None = None) -> str | None:
        warps, size = config.num_warps if config else _WARPS[-1], call.q.shape[-1]
        if config and (config.heads < 1 or config.heads & (config.heads - 1)):
            return f"heads must be a power of two, got {config.heads}"
        if warps not in _WARPS:
            return f"num_warps must be one of {', '.join(map(str, _WARPS))}, got {warps}"
        most = 32 * warps * _VALUES_PER_LANE
        if (config.heads if config else 1) * triton.next_power_of_2(size) > most:
            return f"heads of {size} do not fit the registers of one program ({most} values)"
        return None

    def default(self, call: RopeCall) -> Config:
        """16 values a thread where tokens are few, so that a decode step is short; else 32 in fewer programs."""
        few = call.tokens * call.q_heads.heads * call.q_heads.size < 2**20
        return self._cut(call, *((2048, 16) if few else (4096, 32)))

    def configs(self, call: RopeCall) -> list[Config]:
        cuts = ((1024, 16), (1024, 32), (2048, 16), (2048, 32), (4096, 16), (4096, 32), (8192, 32))
        found = dict.fromkeys(self._cut(call, values, each) for values, each in cuts)
        return [c for c in found if self.refusal(call, c) is None]

    def _cut(self, call: RopeCall, values: int, per_thread: int) -> Config:
        wide = triton.next_power_of_2(call.q.shape[-1])
        most = triton.next_power_of_2(max(call.q_heads.heads, call.k_heads.heads, 1))
        count = min(max(values // wide, 1), most)
        # With two threads for a value of cos and more, all of them load it; with fewer it goes through shared memory.
        return Config(count, min(max(count * wide // (32 * per_thread), wide // 32, 1), _WARPS[-1]))


def _rest_block(call: RopeCall) -> int:
    """Size of the block that holds the values of a head that are not rotated."""
    rest = call.q_heads.size - 2 * call.half
    return triton.next_power_of_2(rest) if rest > 0 else 0


# Rotation


@triton.jit
def _load_pairs(starts, mask, HALF: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
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
def _store_pairs(starts, mask, a, b, HALF: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    if INTERLEAVED:
        cols = tl.arange(0, 2 * BLOCK)[None, :]
        both = tl.reshape(tl.join(a, b), (a.shape[0], 2 * BLOCK))
        tl.store(starts + cols, both, mask=mask & (cols < 2 * HALF))
    else:
        cols = tl.arange(0, BLOCK)[None, :]
        tl.store(starts + cols, a, mask=mask & (cols < HALF))
        tl.store(starts + HALF + cols, b, mask=mask & (cols < HALF))


@triton.jit
def _load_angles(
    cos_ptr, sin_ptr, position, table, cos_stride, sin_stride, HALF: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """cos and sin [1, BLOCK] of a position; NaN for one that is not in the table."""
    cols = tl.arange(0, BLOCK)
    mask = (cols < HALF) & (position >= 0) & (position < table)
    cos = tl.load(cos_ptr + position * cos_stride + cols, mask=mask, other=float("nan")).to(tl.float32)
    sin = tl.load(sin_ptr + position * sin_stride + cols, mask=mask, other=float("nan")).to(tl.float32)
    return cos[None, :], sin[None, :]


@triton.jit
def _rotate(
    x_ptr, y_ptr, w_ptr, cos, sin, first, x_head, y_head, eps, offset,
    COUNT: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
    BLOCK: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """HEADS heads of one token from `first` on, normed first if there is a weight."""
    head = (first + tl.arange(0, HEADS))[:, None].to(tl.int64)
    mask = head < COUNT
    x, y = x_ptr + head * x_head, y_ptr + head * y_head
    a, b = _load_pairs(x, mask, HALF, BLOCK, INTERLEAVED)
    if REST:
        cols = 2 * HALF + tl.arange(0, REST)[None, :]
        rest = tl.load(x + cols, mask=mask & (cols < SIZE), other=0.0).to(tl.float32)
    if w_ptr is not None:
        every = tl.full((1, 1), 1, tl.int1)
        # Loaded before the sums, so that they do not wait for them.
        w_a, w_b = _load_pairs(w_ptr + tl.zeros((1, 1), tl.int32), every, HALF, BLOCK, INTERLEAVED)
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
    _store_pairs(y, mask, a * cos - b * sin, b * cos + a * sin, HALF, BLOCK, INTERLEAVED)


# rope, rope_, rope_backward and qk_norm_rope_: q and k in one launch. In place every value is read and written by one
# program.


class Strided(NamedTuple):
    """Heads in memory: where they begin, and elements from one sequence, token and head to the next."""

    ptr: Any
    sequence: int
    token: int
    head: int


@triton.jit(do_not_specialize=("tokens", "table"))  # they change from call to call
def _rope(
    q, k, q_out, k_out,
    cos_ptr, sin_ptr, positions_ptr, q_weight_ptr, k_weight_ptr,
    tokens, table, cos_stride, sin_stride, eps, offset,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
    BLOCK: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """q, k, q_out and k_out are `Strided`."""
    pdl_wait()
    pdl_launch_dependents()
    Q_BLOCKS: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    BLOCKS: tl.constexpr = Q_BLOCKS + (K_HEADS + HEADS - 1) // HEADS
    token = tl.program_id(0) // BLOCKS
    block = tl.program_id(0) % BLOCKS
    sequence = (token // tokens).to(tl.int64)  # int64: offsets pass 2**31
    place = (token % tokens).to(tl.int64)
    position = place
    if positions_ptr is not None:
        position = tl.load(positions_ptr + token).to(tl.int64)
    cos, sin = _load_angles(cos_ptr, sin_ptr, position, table, cos_stride, sin_stride, HALF, BLOCK)
    if INVERSE:
        sin = -sin
    if block < Q_BLOCKS:
        _rotate(
            q.ptr + sequence * q.sequence + place * q.token,
            q_out.ptr + sequence * q_out.sequence + place * q_out.token,
            q_weight_ptr, cos, sin, block * HEADS, q.head, q_out.head, eps, offset,
            Q_HEADS, SIZE, HALF, HEADS, BLOCK, REST, INTERLEAVED,
        )  # fmt: skip
    else:
        _rotate(
            k.ptr + sequence * k.sequence + place * k.token,
            k_out.ptr + sequence * k_out.sequence + place * k_out.token,
            k_weight_ptr, cos, sin, (block - Q_BLOCKS) * HEADS, k.head, k_out.head, eps, offset,
            K_HEADS, SIZE, HALF, HEADS, BLOCK, REST, INTERLEAVED,
        )  # fmt: skip


@dataclass(frozen=True)
class Rope(RotaryKernel):
    in_place: bool = False
    inverse: bool = False
    norm: bool = False

    def launches(self, call: RopeCall, config: Config) -> list[Launch]:
        if not call.tokens:
            return []
        q, k, layout = call.q_heads, call.k_heads, call.layout
        q_out, k_out = (call.q, call.k) if self.in_place else (call.q_out, call.k_out)
        args = {
            "q": Strided(call.q, *q.strides), "k": Strided(call.k, *k.strides),
            "q_out": Strided(q_out, *heads(q_out, layout).strides),
            "k_out": Strided(k_out, *heads(k_out, layout).strides),
            "cos_ptr": call.cos, "sin_ptr": call.sin, "positions_ptr": call.positions,
            "q_weight_ptr": call.q_weight if self.norm else None, "k_weight_ptr": call.k_weight if self.norm else None,
            "tokens": q.tokens, "table": call.cos.shape[0],
            "cos_stride": call.cos.stride(0), "sin_stride": call.sin.stride(0),
            "eps": call.eps if self.norm else 0.0, "offset": call.offset if self.norm else 0.0,
        }  # fmt: skip
        whole = self.norm or not self.in_place  # else what is not rotated stays where it is
        constants = {
            "Q_HEADS": q.heads, "K_HEADS": k.heads, "SIZE": q.size, "HALF": call.half, "HEADS": config.heads,
            "BLOCK": triton.next_power_of_2(call.half), "REST": _rest_block(call) if whole else 0,
            "INTERLEAVED": call.interleaved, "INVERSE": self.inverse,
        }  # fmt: skip
        blocks = triton.cdiv(q.heads, config.heads) + triton.cdiv(k.heads, config.heads)
        return [Launch(_rope, call.tokens * blocks, args, constants, {"num_warps": config.num_warps}, pdl=True)]


rope, rope_, rope_backward = Rope(), Rope(in_place=True), Rope(inverse=True)
qk_norm_rope_ = Rope(in_place=True, norm=True)


# rope_cache_write_: heads of q are rotated where they lie, those of k and v on their way to the cache


class Packed(NamedTuple):
    """Heads of packed tokens in memory."""

    ptr: Any
    token: int
    head: int


class Cache(NamedTuple):
    """Keys and values in a paged cache, which lie alike."""

    k_ptr: Any
    v_ptr: Any
    block: int  # elements from one block, token and head to the next
    token: int
    head: int


@triton.jit
def _stored(x, scale_ptr, head, mask, PER_HEAD: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """x [heads, BLOCK] as the cache holds it."""
    if FORMAT is not None:
        scale = tl.load(scale_ptr + head, mask=mask, other=1.0) if PER_HEAD else tl.load(scale_ptr)
        x = quantize(tl.div_rn(x, tl.broadcast_to(scale, x.shape)), FORMAT, NATIVE)
    return x


@triton.jit
def _copy(
    x, y, scale_ptr, head, mask, FIRST: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    PER_HEAD: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Values FIRST to SIZE of heads that start at x [heads, 1], to y."""
    cols = FIRST + tl.arange(0, BLOCK)[None, :]
    inside = mask & (cols < SIZE)
    values = tl.load(x + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + cols, _stored(values, scale_ptr, head, mask, PER_HEAD, FORMAT, NATIVE), mask=inside)


@triton.jit
def _write_keys(
    x, y, cos, sin, scale_ptr, head, mask, SIZE: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    REST: tl.constexpr, INTERLEAVED: tl.constexpr, PER_HEAD: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    a, b = _load_pairs(x, mask, HALF, BLOCK, INTERLEAVED)
    first = _stored(a * cos - b * sin, scale_ptr, head, mask, PER_HEAD, FORMAT, NATIVE)
    second = _stored(b * cos + a * sin, scale_ptr, head, mask, PER_HEAD, FORMAT, NATIVE)
    _store_pairs(y, mask, first, second, HALF, BLOCK, INTERLEAVED)
    if REST:
        _copy(x, y, scale_ptr, head, mask, 2 * HALF, SIZE, REST, PER_HEAD, FORMAT, NATIVE)


@triton.jit(do_not_specialize=("table", "slots_end"))  # they change from call to call
def _rope_cache_write(
    q, k, v, cache, cos_ptr, sin_ptr, positions_ptr, slots_ptr, k_scale_ptr, v_scale_ptr,
    table, slots_end, cos_stride, sin_stride,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, WHOLE: tl.constexpr, INTERLEAVED: tl.constexpr,
    K_PER_HEAD: tl.constexpr, V_PER_HEAD: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """q, k and v are `Packed`, cache is a `Cache`."""
    pdl_wait()
    Q_BLOCKS: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    K_BLOCKS: tl.constexpr = (K_HEADS + HEADS - 1) // HEADS
    token = (tl.program_id(0) // (Q_BLOCKS + 2 * K_BLOCKS)).to(tl.int64)  # int64: offsets pass 2**31
    block = tl.program_id(0) % (Q_BLOCKS + 2 * K_BLOCKS)
    position = tl.load(positions_ptr + token).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if block < Q_BLOCKS:
        cos, sin = _load_angles(cos_ptr, sin_ptr, position, table, cos_stride, sin_stride, HALF, BLOCK)
        x = q.ptr + token * q.token
        _rotate(
            x, x, None, cos, sin, block * HEADS, q.head, q.head, 0.0, 0.0,
            Q_HEADS, SIZE, HALF, HEADS, BLOCK, 0, INTERLEAVED,
        )  # fmt: skip
    elif (slot >= 0) & (slot < slots_end):
        target = slot // BLOCK_SIZE * cache.block + slot % BLOCK_SIZE * cache.token
        head = ((block - Q_BLOCKS) % K_BLOCKS * HEADS + tl.arange(0, HEADS))[:, None].to(tl.int64)
        mask = head < K_HEADS
        y = target + head * cache.head
        if block < Q_BLOCKS + K_BLOCKS:
            cos, sin = _load_angles(cos_ptr, sin_ptr, position, table, cos_stride, sin_stride, HALF, BLOCK)
            _write_keys(
                k.ptr + token * k.token + head * k.head, cache.k_ptr + y, cos, sin, k_scale_ptr, head, mask,
                SIZE, HALF, BLOCK, REST, INTERLEAVED, K_PER_HEAD, FORMAT, NATIVE,
            )  # fmt: skip
        else:
            x = v.ptr + token * v.token + head * v.head
            _copy(x, cache.v_ptr + y, v_scale_ptr, head, mask, 0, SIZE, WHOLE, V_PER_HEAD, FORMAT, NATIVE)


class RopeCacheWrite(RotaryKernel):
    def launches(self, call: CacheWriteCall, config: Config) -> list[Launch]:
        if not call.tokens:
            return []
        k_cache, v_cache, format = call.k_cache, call.v_cache, kv_cache.FORMATS.get(call.k_cache.dtype)
        blocks, block_size, k_heads, size = k_cache.shape
        if format:
            k_cache, v_cache = as_bytes(k_cache), as_bytes(v_cache)
        args = {name: Packed(x, x.stride(0), x.stride(1)) for name, x in (("q", call.q), ("k", call.k), ("v", call.v))}
        args |= {
            "cache": Cache(k_cache, v_cache, *k_cache.strides[:3]),
            "cos_ptr": call.cos, "sin_ptr": call.sin, "positions_ptr": call.positions, "slots_ptr": call.slots,
            "k_scale_ptr": call.k_scale, "v_scale_ptr": call.v_scale,
            "table": call.cos.shape[0], "slots_end": blocks * block_size,
            "cos_stride": call.cos.stride(0), "sin_stride": call.sin.stride(0),
        }  # fmt: skip
        k_per_head, v_per_head = (scale is not None and scale.shape[0] > 1 for scale in (call.k_scale, call.v_scale))
        constants = {
            "Q_HEADS": call.q_heads.heads, "K_HEADS": k_heads, "SIZE": size, "HALF": call.half,
            "BLOCK_SIZE": block_size, "HEADS": config.heads, "BLOCK": triton.next_power_of_2(call.half),
            "REST": _rest_block(call), "WHOLE": triton.next_power_of_2(size), "INTERLEAVED": call.interleaved,
            "K_PER_HEAD": k_per_head, "V_PER_HEAD": v_per_head,
            "FORMAT": format, "NATIVE": format is not None and native(call.q.device),
        }  # fmt: skip
        programs = triton.cdiv(call.q_heads.heads, config.heads) + 2 * triton.cdiv(k_heads, config.heads)
        options = {"num_warps": config.num_warps}
        return [Launch(_rope_cache_write, call.tokens * programs, args, constants, options, pdl=True)]


rope_cache_write_ = RopeCacheWrite()
