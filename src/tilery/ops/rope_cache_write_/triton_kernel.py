"""A program takes a few heads of one token: of q, turned where they lie, or of k or v, on their way to the cache."""

import triton
import triton.language as tl

from tilery.base.spec import Artifact, TensorSpec
from tilery.languages import triton_glue
from tilery.languages.triton_glue import take_over
from tilery.parts import kv_cache, triton_rope
from tilery.parts.triton_fp8 import as_bytes, native, quantise
from tilery.parts.triton_rope import Config, load_angles, load_pairs, store_pairs, turn

archs = triton_rope.archs


def refusal(q: TensorSpec, *rest, config: Config | None = None) -> str | None:
    return triton_rope.refusal(q, config)


def default(q: TensorSpec, k: TensorSpec, *rest) -> Config:
    return triton_rope.default(q, k, "thd")


def configs(q: TensorSpec, k: TensorSpec, *rest) -> list[Config]:
    return triton_rope.configs(q, k, "thd")


@triton.jit
def _stored(x, scale_ptr, head, mask, PER_HEAD: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """x [heads, BLOCK] as the cache holds it."""
    if FORMAT is not None:
        scale = tl.load(scale_ptr + head, mask=mask, other=1.0) if PER_HEAD else tl.load(scale_ptr)
        x = quantise(tl.div_rn(x, tl.broadcast_to(scale, x.shape)), FORMAT, NATIVE)
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
def _key(
    x, y, cos, sin, scale_ptr, head, mask, SIZE: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    REST: tl.constexpr, INTERLEAVED: tl.constexpr, PER_HEAD: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    a, b = load_pairs(x, mask, HALF, BLOCK, INTERLEAVED)
    first = _stored(a * cos - b * sin, scale_ptr, head, mask, PER_HEAD, FORMAT, NATIVE)
    second = _stored(b * cos + a * sin, scale_ptr, head, mask, PER_HEAD, FORMAT, NATIVE)
    store_pairs(y, mask, first, second, HALF, BLOCK, INTERLEAVED)
    if REST:
        _copy(x, y, scale_ptr, head, mask, 2 * HALF, SIZE, REST, PER_HEAD, FORMAT, NATIVE)


@triton_glue.early
@triton.jit(do_not_specialize=("table", "slots_end"))  # they change from call to call
def _rope_cache_write(
    q_ptr, k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, k_scale_ptr, v_scale_ptr,
    table, slots_end, q_token, q_head, k_token, k_head, v_token, v_head, c_block, c_token, c_head,
    cos_stride, sin_stride,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, WHOLE: tl.constexpr, INTERLEAVED: tl.constexpr,
    K_PER_HEAD: tl.constexpr, V_PER_HEAD: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    take_over()
    Q_BLOCKS: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    K_BLOCKS: tl.constexpr = (K_HEADS + HEADS - 1) // HEADS
    token = (tl.program_id(0) // (Q_BLOCKS + 2 * K_BLOCKS)).to(tl.int64)  # int64: offsets pass 2**31
    block = tl.program_id(0) % (Q_BLOCKS + 2 * K_BLOCKS)
    position = tl.load(positions_ptr + token).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if block < Q_BLOCKS:
        cos, sin = load_angles(cos_ptr, sin_ptr, position, table, cos_stride, sin_stride, HALF, BLOCK)
        q = q_ptr + token * q_token
        turn(
            q, q, None, cos, sin, block * HEADS, q_head, q_head, 0.0, 0.0,
            Q_HEADS, SIZE, HALF, HEADS, BLOCK, 0, INTERLEAVED,
        )  # fmt: skip
    elif (slot >= 0) & (slot < slots_end):
        target = slot // BLOCK_SIZE * c_block + slot % BLOCK_SIZE * c_token
        head = ((block - Q_BLOCKS) % K_BLOCKS * HEADS + tl.arange(0, HEADS))[:, None].to(tl.int64)
        mask = head < K_HEADS
        y = target + head * c_head
        if block < Q_BLOCKS + K_BLOCKS:
            cos, sin = load_angles(cos_ptr, sin_ptr, position, table, cos_stride, sin_stride, HALF, BLOCK)
            _key(
                k_ptr + token * k_token + head * k_head, k_cache_ptr + y, cos, sin, k_scale_ptr, head, mask,
                SIZE, HALF, BLOCK, REST, INTERLEAVED, K_PER_HEAD, FORMAT, NATIVE,
            )  # fmt: skip
        else:
            x = v_ptr + token * v_token + head * v_head
            _copy(x, v_cache_ptr + y, v_scale_ptr, head, mask, 0, SIZE, WHOLE, V_PER_HEAD, FORMAT, NATIVE)


def _arguments(config: Config, q, k, v, k_cache, v_cache, cos, sin, positions, slots, k_scale, v_scale, interleaved):
    """The launch arguments, of tensors for `run` and of specs for `compile`."""
    format = kv_cache.FORMATS.get(k_cache.dtype)
    blocks, block_size, k_heads, size = k_cache.shape
    strides = [x.stride(d) for x in (q, k, v) for d in (0, 1)] + [k_cache.stride(d) for d in (0, 1, 2)]
    caches = (as_bytes(k_cache), as_bytes(v_cache)) if format else (k_cache, v_cache)
    arguments = (
        q, k, v, *caches, cos, sin, positions, slots, k_scale, v_scale,
        cos.shape[0], blocks * block_size, *strides, cos.stride(0), sin.stride(0),
    )  # fmt: skip
    half = cos.shape[1]
    k_per_head, v_per_head = (scale is not None and scale.shape[0] > 1 for scale in (k_scale, v_scale))
    return arguments, {
        "Q_HEADS": q.shape[1], "K_HEADS": k_heads, "SIZE": size, "HALF": half, "BLOCK_SIZE": block_size,
        "HEADS": config.heads, "BLOCK": triton.next_power_of_2(half), "REST": triton_rope.rest(size, half),
        "WHOLE": triton.next_power_of_2(size), "INTERLEAVED": interleaved,
        "K_PER_HEAD": k_per_head, "V_PER_HEAD": v_per_head,
        "FORMAT": format, "NATIVE": format is not None and native(q.device),
    }  # fmt: skip


def compile(specs, config: Config, arch: str) -> Artifact:
    return triton_glue.legacy_compile(
        _rope_cache_write, *_arguments(config, *specs), {"num_warps": config.num_warps}, arch
    )


def run(outs, args, config: Config) -> None:
    q, k, *_ = args
    arguments, constants = _arguments(config, *args)
    blocks = triton.cdiv(q.shape[1], config.heads) + 2 * triton.cdiv(k.shape[1], config.heads)
    options = {"num_warps": config.num_warps}
    triton_glue.legacy_launch(_rope_cache_write, (q.shape[0] * blocks,), arguments, constants, options)
