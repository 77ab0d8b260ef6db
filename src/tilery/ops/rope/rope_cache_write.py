"""Contract of rope_cache_write_."""

from typing import Any

import torch
from torch import Tensor

from tilery.base.spec import Bucket, Cost, case, dtype_name
from tilery.core import inputs as random
from tilery.core.op import op
from tilery.core.peers import Compiled, baselines
from tilery.ops.rope import contract, kv_cache, peers
from tilery.ops.rope.call import CacheWriteCall
from tilery.ops.rope.heads import check_heads, model_sizes
from tilery.ops.rows.contract import check_like

# Checked against values that are not rounded to fp8: that alone costs 2.6e-2 in e4m3 and 5.2e-2 in e5m2.
ALLOWED = {**contract.ALLOWED, torch.float8_e4m3fn: 4e-2, torch.float8_e5m2: 8e-2}


def _check(call: CacheWriteCall) -> None:
    contract.check(call)
    check_heads("v", call.v, call.layout)
    check_like("v", call.v, "k", call.k)
    contract.check_integers("slots", call.slots, (call.tokens,))
    _, kv_heads, size = call.k.shape
    kv_cache.check(call.k_cache, call.v_cache, call.k_scale, call.v_scale, kv_heads, size, call.q.dtype)


def _cost(call: CacheWriteCall) -> Cost:
    q, k, cos, half = call.q, call.k, call.cos, call.half
    rotated = q.nbytes * 2 * half // max(q.shape[2], 1)
    table = 2 * min(cos.shape[0], call.tokens) * half * cos.dtype.itemsize
    reads = rotated + k.nbytes + call.v.nbytes + table + call.positions.nbytes + call.slots.nbytes
    writes = rotated + 2 * (k.nbytes // k.dtype.itemsize) * call.k_cache.dtype.itemsize
    return Cost(6 * call.tokens * (q.shape[1] + k.shape[1]) * half, reads, writes)


def _bucket(call: CacheWriteCall) -> Bucket:
    exact, scaled = contract.bucket(call)
    return Bucket(f"{exact},block={call.k_cache.shape[1]},cache={dtype_name(call.k_cache.dtype)}", scaled)


def _inputs(
    m: int, heads: int = 3, kv_heads: int = 2, n: int = 16, dtype: str = "bf16", rotary: int = 0,
    places: str = "int32", angles: str = "fp32", interleaved: bool = False, block_size: int = 16, format: str = "none",
    per: str = "tensor", skip: bool = True, outside: bool = False, layout: str = "contiguous", special: str = "none",
    device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """`format` none: the cache is of `dtype`; `per` tensor, head or both (v's per head): its scales.

    `outside`: some slots are none of the cache.
    """
    drawn = contract.draw(
        m, heads, kv_heads, n, dtype, rotary=rotary, order="thd", places=places, angles=angles,
        interleaved=interleaved, layout=layout, special=special, device=device, seed=seed,
    )  # fmt: skip
    del drawn["layout"]
    g = random.generator(seed + 1, device)
    kind = random.dtype_of(dtype if format == "none" else format)
    shape = (m // block_size + 2, block_size, kv_heads, n)
    k_cache, v_cache = kv_cache.draw(shape, kind, layout != "contiguous", g)
    slots = kv_cache.draw_slots(m, k_cache, skip, drawn["positions"].dtype, g, outside)
    scales: list[Tensor | None] = [None, None]
    if format != "none":
        counts = {"tensor": (1, 1), "head": (kv_heads, kv_heads), "both": (1, kv_heads)}[per]
        scales = [torch.rand(count, generator=g, device=g.device) * 0.1 + 0.02 for count in counts]
    return {**drawn, "k_cache": k_cache, "v_cache": v_cache, "slots": slots, "k_scale": scales[0], "v_scale": scales[1]}


def _torch(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, cos: Tensor, sin: Tensor, positions: Tensor,
    slots: Tensor, k_scale: Tensor | None, v_scale: Tensor | None, interleaved: bool,
) -> None:  # fmt: skip
    """Knows no skipped tokens: to leave them out, torch would have to wait for the slots."""
    how = cos, sin, positions, "thd", interleaved
    q.copy_(peers.rotated(q, *how))
    where = slots // k_cache.shape[1], slots % k_cache.shape[1]
    k_cache[where] = kv_cache.stored(peers.rotated(k, *how), k_scale, k_cache.dtype)
    v_cache[where] = kv_cache.stored(v, v_scale, v_cache.dtype)


def _check_indices(call: CacheWriteCall) -> None:
    contract.check_positions(call)
    kv_cache.check_slots(call.slots, call.k_cache)


_LLAMA: dict[str, Any] = {"heads": 32, "kv_heads": 8, "n": 128, "dtype": "bf16", "skip": False}


@op(
    check=_check, outputs=lambda call: {}, cost=_cost, bucket=_bucket, inputs=_inputs, allowed=ALLOWED,
    call_type=CacheWriteCall, mutates=("q", "k_cache", "v_cache"),
    kernels={"numba": "numba_kernels:rope_cache_write_", "triton": "triton_kernels:rope_cache_write_"},
    model_sizes=model_sizes, baselines=baselines(torch=_torch, compile=Compiled(_torch)), indices=_check_indices,
    cases={
        "test": [
            case(m=4, heads=2, kv_heads=1, n=6, dtype="fp32"),
            case(m=7, heads=3, kv_heads=2, n=64, dtype="bf16"),
            case(m=7, heads=3, kv_heads=2, n=64, dtype="fp16", interleaved=True, block_size=32),
            case(m=20, heads=9, kv_heads=3, n=48, dtype="fp32", places="int64"),  # slots in several blocks
            case(m=3, heads=4, kv_heads=4, n=80, dtype="fp16", rotary=24, block_size=256),  # partial
            case(m=7, heads=4, kv_heads=2, n=64, dtype="fp16", format="e4m3"),
            case(m=7, heads=4, kv_heads=2, n=64, dtype="fp32", format="e5m2", per="head", interleaved=True),
            case(m=5, heads=8, kv_heads=2, n=128, dtype="bf16", format="e4m3", per="head"),
            case(m=5, heads=4, kv_heads=2, n=64, dtype="fp16", format="e4m3", per="both", angles="same"),
            case(m=4, heads=4, kv_heads=2, n=80, dtype="fp16", rotary=24, format="e4m3", layout="padded"),
            case(m=1, heads=1, kv_heads=1, n=2, dtype="fp32"),
            case(m=0, heads=4, kv_heads=2, n=64, dtype="fp32"),
            case(m=4, heads=4, kv_heads=2, n=64, dtype="fp16", layout="padded"),
            case(m=4, heads=3, kv_heads=2, n=64, dtype="bf16", layout="misaligned"),
            case(m=3, heads=2, kv_heads=1, n=64, dtype="fp16", layout="far"),
            case(m=6, heads=2, kv_heads=1, n=32, dtype="fp32", places="outside"),
            case(m=6, heads=2, kv_heads=1, n=32, dtype="fp16", places="outside32"),
            case(m=8, heads=2, kv_heads=1, n=32, dtype="fp32", places="int64", outside=True),
            case(m=8, heads=2, kv_heads=1, n=32, dtype="bf16", outside=True, format="e4m3"),
            case(m=3, heads=2, kv_heads=1, n=32, dtype="fp32", special="nan"),
            case(m=3, heads=2, kv_heads=1, n=32, dtype="fp16", special="inf"),
        ],
        "bench": [case(m=m, **_LLAMA) for m in (16, 8192)] + [case(m=m, format="e4m3", **_LLAMA) for m in (16, 8192)],
        "bench_cpu": [case(m=2048, **_LLAMA | {"heads": 16, "dtype": dtype}) for dtype in ("fp32", "bf16")],
    },
)  # fmt: skip
def rope_cache_write_(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, cos: Tensor, sin: Tensor, positions: Tensor,
    slots: Tensor, k_scale: Tensor | None = None, v_scale: Tensor | None = None, interleaved: bool = False,
) -> None:  # fmt: skip
    """q = rope(q) in place; k_cache[slot] = rope(k) / k_scale and v_cache[slot] = v / v_scale for every token's slot.

    q [T, H, D], k and v [T, kv_heads, D], caches [blocks, block_size, kv_heads, D]; cos, sin and positions are rope's.
    docs/kv_cache.md says what slots and scales are; no two tokens may have the same slot. A token with slot -1, or any
    other that the caches do not have, is rotated and not cached. k itself is kept.
    """
    how = cos, sin, positions, "thd", interleaved
    q.copy_(contract.rotated(q, *how))
    kv_cache.write(k_cache, contract.rotated(k, *how), slots, k_scale)
    kv_cache.write(v_cache, v, slots, v_scale)
