"""The paged KV cache of docs/kv_cache.md: what its tensors are, where a token lies, how a value is stored."""

from typing import Any

import torch
from torch import Tensor

from tilery.base.errors import require
from tilery.base.spec import DTYPES, TensorSpec, dtype_name
from tilery.core.indices import require_between
from tilery.ops.quantize import formats

BLOCK_SIZES = (16, 32, 64, 128, 256)
FORMATS = {DTYPES[name]: name for name in formats.LARGEST}  # names of an fp8 cache's dtypes


def check(
    k_cache: TensorSpec, v_cache: TensorSpec, k_scale: TensorSpec | None, v_scale: TensorSpec | None,
    kv_heads: int, size: int, dtype: torch.dtype,
) -> None:  # fmt: skip
    """The cache must be for keys and values of [kv_heads, size] in a model of `dtype`."""
    shape = k_cache.shape
    require(
        len(shape) == 4 and tuple(shape[2:]) == (kv_heads, size),
        f"k_cache must be [blocks, block_size, {kv_heads}, {size}], got {list(shape)}",
    )
    sizes = ", ".join(map(str, BLOCK_SIZES))
    require(shape[1] in BLOCK_SIZES, f"k_cache must have a block_size of {sizes}, got {shape[1]}")
    require(k_cache.stride(-1) == 1, f"k_cache must have stride 1 along its last dimension, got {k_cache.stride(-1)}")
    same = (v_cache.shape, v_cache.strides, v_cache.dtype) == (shape, k_cache.strides, k_cache.dtype)
    require(same, f"v_cache must be as k_cache in shape, strides and dtype, {k_cache}, got {v_cache}")
    known = ", ".join(map(dtype_name, (dtype, *FORMATS)))
    require(k_cache.dtype in (dtype, *FORMATS), f"k_cache must be one of {known}, got {dtype_name(k_cache.dtype)}")
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        _check_scale(name, scale, k_cache, kv_heads)


def _check_scale(name: str, scale: TensorSpec | None, cache: TensorSpec, kv_heads: int) -> None:
    if cache.dtype not in FORMATS:
        require(scale is None, f"{name} is for an fp8 cache; one of {dtype_name(cache.dtype)} takes None")
        return
    require(scale is not None, f"{name} must be given for a cache of {dtype_name(cache.dtype)}, got None")
    assert scale is not None
    require(scale.dtype == torch.float32, f"{name} must be fp32, got {dtype_name(scale.dtype)}")
    dense = scale.shape in ((1,), (kv_heads,)) and (scale.shape[0] == 1 or scale.stride(0) == 1)
    require(dense, f"{name} must be [1] or [{kv_heads}] and contiguous, got {list(scale.shape)}")


def check_slots(slots: Tensor, cache: Tensor) -> None:
    """Every slot must be in the cache, or -1."""
    require_between("slots", slots, 0, cache.shape[0] * cache.shape[1] - 1, allow=-1)


def write(cache: Tensor, values: Tensor, slots: Tensor, scale: Tensor | None) -> None:
    """Write values [T, kv_heads, head_dim] to their slots, rounded where the cache is fp8: the reference."""
    blocks, block_size = cache.shape[:2]
    kept = (slots >= 0) & (slots < blocks * block_size)
    where = slots[kept].long()
    cache[where // block_size, where % block_size] = stored(values[kept], scale, cache.dtype)


def stored(values: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """[..., kv_heads, head_dim] as a cache of `dtype` holds them; float64 copies of fp8 caches are not rounded."""
    if scale is not None:
        values = values / scale.unsqueeze(-1)
    if dtype in FORMATS:
        largest = formats.LARGEST[FORMATS[dtype]]
        values = values.float().clamp(-largest, largest)
    return values.to(dtype)


def draw(shape: tuple[int, ...], dtype: torch.dtype, together: bool, g: Any) -> tuple[Tensor, Tensor]:
    """Keys and values full of what was there before; `together`: views of one tensor [blocks, 2, …]."""
    both = torch.randn(shape[0], 2, *shape[1:], generator=g, device=g.device).to(dtype)
    k, v = both.unbind(1)
    return (k, v) if together else (k.contiguous(), v.contiguous())


def draw_slots(tokens: int, cache: Tensor, skip: bool, kind: torch.dtype, g: Any, outside: bool = False) -> Tensor:
    """Distinct slots all over the cache; every fifth token is skipped if some are; `outside`: the first are none."""
    count = cache.shape[0] * cache.shape[1]
    slots = torch.randperm(count, generator=g, device=g.device)[:tokens]
    if skip:
        slots[1::5] = -1
    if outside:
        large = (2**32, 2**62, -(2**63)) if kind == torch.int64 else (2**31 - 1, -(2**31))
        wrong = torch.tensor((count, -2, *large), device=g.device)[:tokens]
        slots[: len(wrong)] = wrong
    return slots.to(kind)
