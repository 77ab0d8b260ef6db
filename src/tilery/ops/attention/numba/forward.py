"""attention, attention_lse, mla, attention_decode, attention_chunked and mla_decode on the CPU: forward_kernel.py."""

from dataclasses import dataclass
from typing import Any

import torch

from tilery.base.integers import ceil_div
from tilery.base.launch import Launch
from tilery.base.spec import TensorSpec
from tilery.core.kernel import Kernel
from tilery.languages import numba_elements
from tilery.languages.numba_elements import DEPTH, ROWS
from tilery.languages.numba_glue import threads
from tilery.ops.attention.call import AttentionCall, MlaCall, MlaDecodeCall, PagedCall, broadcast_stride
from tilery.ops.attention.numba.blocks import Arguments
from tilery.ops.attention.numba.forward_kernel import Dtypes, Scoring, Sizes, Strides, Tensors, attention_kernel
from tilery.ops.attention.numba.products import BLOCK, DTYPE_CODES, padded

_CHUNK = 1024  # keys of a cache
_ROWS = 192  # of a block: its scores take 192 KiB of an L2 cache
_PARALLEL = 2**19  # multiplications from which on the other cores are woken


@dataclass(frozen=True)
class Config:
    rows: int  # of a block
    chunk: int  # keys that a core takes before their results are combined; 0: all
    parallel: bool


class NumbaAttention(Kernel):
    """A kernel of the family: what `arguments` makes of its call is all that is its own."""

    archs = ("cpu",)
    Config = Config
    splits_keys = False  # whether queries are few and keys many: these are split, alike in any batch

    def arguments(self, call: Any) -> Arguments:
        raise NotImplementedError

    def sizes(self, call: Any) -> Sizes:
        raise NotImplementedError

    def refusal(self, call: Any, config: Config | None = None) -> str | None:
        if config is not None and (config.rows < 1 or config.rows % ROWS):
            return f"rows must be a multiple of the register tile's {ROWS}, got {config.rows}"
        if config is not None and (config.chunk < 0 or config.chunk % BLOCK):
            return f"chunk must be a multiple of {BLOCK}, got {config.chunk}"
        return numba_elements.refusal(call.q._replace(dtype=torch.float16))  # one kernel reads every dtype

    def default(self, call: Any) -> Config:
        sizes = self.sizes(call)
        total, pairs = sizes.queries * sizes.group, sizes.batch * sizes.kv_heads
        parallel = pairs * total * sizes.keys * (sizes.k + sizes.v) >= _PARALLEL
        if self.splits_keys:
            return Config(_rounded(total, _ROWS), _CHUNK if sizes.keys > _CHUNK else 0, parallel)
        rows, busy = _ROWS, 2 * threads(parallel)
        while rows > 4 * ROWS and pairs * ceil_div(total, rows) < busy:
            rows //= 2
        return Config(_rounded(total, rows), 0, parallel)

    def configs(self, call: Any) -> list[Config]:
        sizes = self.sizes(call)
        total = sizes.queries * sizes.group
        rows = dict.fromkeys(_rounded(total, most) for most in (4 * ROWS, 8 * ROWS, 16 * ROWS, 32 * ROWS))
        chunks = (0, _CHUNK, 4 * _CHUNK) if self.splits_keys else (0,)
        return [Config(r, chunk, parallel) for r in rows for chunk in chunks for parallel in (False, True)]

    def workspace(self, call: Any, config: Config) -> dict[str, TensorSpec]:
        """Memory for each thread's buffers; for each chunk of each row sums, maximum and sum, if there are several."""
        sizes, where, chunks = self.sizes(call), call.q.device, self._chunks(call, config)
        depth, width = sizes.k + sizes.k_rope, padded(sizes.v)
        floats = config.rows * (ceil_div(depth, DEPTH) * DEPTH + BLOCK + width + 2) + BLOCK * max(depth, width)
        floats += max(depth, sizes.v, BLOCK)
        rows = sizes.batch * sizes.kv_heads * chunks * sizes.queries * sizes.group if chunks > 1 else 0
        memory = threads(config.parallel), ceil_div(floats, 16) * 16
        return {
            "memory": TensorSpec.contiguous(memory, torch.float32, where),
            "partials": TensorSpec.contiguous((rows, sizes.v + 2), torch.float32, where),
        }

    def _chunks(self, call: Any, config: Config) -> int:
        return max(ceil_div(self.sizes(call).keys, config.chunk), 1) if config.chunk else 1

    def launches(self, call: Any, config: Config) -> list[Launch]:
        tensors, strides, sizes, scoring, dtypes = self.arguments(call)
        flat = tuple(step for steps in strides for step in (steps if isinstance(steps, tuple) else (steps,)))
        args = {
            "memory": call.memory, "partials": call.partials, "pitch": call.memory.shape[1],
            "cut": (config.rows, config.chunk, self._chunks(call, config)),
            "tensors": tuple(0 if x is None else x for x in tensors), "strides": flat, "sizes": tuple(sizes),
            "scoring": tuple(scoring), "dtypes": tuple(dtypes),
        }  # fmt: skip
        return [Launch(attention_kernel, 1, args, options={"parallel": config.parallel})]


def _rounded(total: int, most: int) -> int:
    return ceil_div(min(max(total, 1), most), ROWS) * ROWS


def _bytes(x: TensorSpec, sequence: int, token: int, head: int) -> tuple[int, int, int]:
    """Strides of a tensor in bytes."""
    size = x.dtype.itemsize
    return sequence * size, token * size, head * size


def _per_head(scale: TensorSpec | None) -> int:
    """Elements from one head's scale to the next."""
    return int(scale is not None and scale.shape[0] > 1)


class Attention(NumbaAttention):
    """attention and attention_lse, which differ in whether the call has an lse."""

    def sizes(self, call: AttentionCall) -> Sizes:
        packed = (call.tokens, call.key_tokens) if call.packed else (0, 0)
        return Sizes(
            batch=call.batch, kv_heads=call.kv_heads, group=call.group, queries=call.queries, keys=call.keys,
            q=call.q.shape[-1], k=call.k.shape[-1], v=call.value_dim, packed=packed[0], packed_keys=packed[1],
        )  # fmt: skip

    def arguments(self, call: AttentionCall) -> Arguments:
        lse, bias, mask = call.lse, call.bias, call.key_mask
        strides = _of_qkv(call)
        if lse is not None:
            strides = strides._replace(lse=_bytes(lse, 0 if call.packed else lse.stride(0), 1, lse.stride(-2)))
        if bias is not None:
            by_sequence, by_head, by_query = (broadcast_stride(bias, dim) for dim in range(3))
            steps, by_key = _bytes(bias, by_sequence, by_query, by_head), bias.stride(3) * bias.dtype.itemsize
            strides = strides._replace(bias=steps, bias_key=by_key)
        if mask is not None:
            strides = strides._replace(key_mask=mask.stride(0), key_mask_key=mask.stride(1))
        tensors = Tensors(
            q=call.q, k=call.k, v=call.v, out=call.out, lse=lse, cu_q=call.cu_seqlens_q, cu_k=call.cu_seqlens_k,
            key_mask=mask, bias=bias, slopes=call.slopes, sinks=call.sinks, q_scale=call.q_scale,
            k_scale=call.k_scale, v_scale=call.v_scale,
        )  # fmt: skip
        scoring = Scoring(
            scale=call.softmax_scale, softcap=float(call.softcap), window=call.effective_window, causal=int(call.causal)
        )
        dtypes = _dtypes(call)._replace(bias=0 if bias is None else DTYPE_CODES[bias.dtype])
        return Arguments(tensors, strides, self.sizes(call), scoring, dtypes)


def _of_qkv(call: AttentionCall) -> Strides:
    return Strides(*(_bytes(x, *call.strides(x)) for x in (call.q, call.k, call.v, call.out)))


def _dtypes(call: AttentionCall) -> Dtypes:
    return Dtypes(DTYPE_CODES[call.q.dtype], DTYPE_CODES[call.k.dtype], DTYPE_CODES[call.out.dtype])


class Mla(Attention):
    """Attention whose heads lie in two tensors, the second part of the keys being one for all heads."""

    def sizes(self, call: MlaCall) -> Sizes:
        return super().sizes(call)._replace(q_rope=call.rope_dim, k_rope=call.rope_dim)

    def arguments(self, call: MlaCall) -> Arguments:
        by_query, by_key = call.strides(call.q_rope), call.strides(call.k_rope)._replace(head=0)
        strides = _of_qkv(call)._replace(q_rope=_bytes(call.q, *by_query), k_rope=_bytes(call.k, *by_key))
        tensors = Tensors(
            q=call.q, k=call.k, v=call.v, out=call.out, q_rope=call.q_rope, k_rope=call.k_rope,
            cu_q=call.cu_seqlens_q, cu_k=call.cu_seqlens_k,
        )  # fmt: skip
        scoring = Scoring(call.softmax_scale, causal=int(call.causal))
        return Arguments(tensors, strides, self.sizes(call), scoring, _dtypes(call))


class AttentionChunked(NumbaAttention):
    def sizes(self, call: PagedCall) -> Sizes:
        size, packed = call.head_dim, call.q.shape[0] if call.cu_seqlens_q is not None else 0
        return Sizes(
            batch=call.batch, kv_heads=call.kv_heads, group=call.group, queries=call.queries, keys=call.max_keys,
            q=size, k=size, v=size, page=call.page, packed=packed, pages=call.k_cache.shape[0],
        )  # fmt: skip

    def arguments(self, call: PagedCall) -> Arguments:
        q, k, out = call.q, call.k_cache, call.out
        by_page = _bytes(k, *k.strides[:3])
        packed = call.cu_seqlens_q is not None
        of_out = (*([0] if packed else []), *out.strides[:-1])
        lse = call.lse  # [T, H]
        by_row = (0, 0, 0) if lse is None else _bytes(lse, 0 if packed else call.queries * call.heads, call.heads, 1)
        strides = Strides(
            q=_bytes(q, *call.q_strides), k=by_page, v=by_page, out=_bytes(out, *of_out), lse=by_row,
            table=call.table_stride * 4, k_scale=_per_head(call.k_scale), v_scale=_per_head(call.v_scale),
        )  # fmt: skip
        tensors = Tensors(
            q=q, k=k, v=call.v_cache, out=out, lse=lse, cu_q=call.cu_seqlens_q, lengths=call.lengths,
            table=call.block_table, sinks=call.sinks, k_scale=call.k_scale, v_scale=call.v_scale,
        )  # fmt: skip
        scoring = Scoring(
            scale=call.softmax_scale, softcap=float(call.softcap), window=call.effective_window, causal=int(call.causal)
        )
        dtypes = Dtypes(DTYPE_CODES[q.dtype], DTYPE_CODES[k.dtype], DTYPE_CODES[out.dtype])
        return Arguments(tensors, strides, self.sizes(call), scoring, dtypes)


class AttentionDecode(AttentionChunked):
    splits_keys = True


class MlaDecode(NumbaAttention):
    """All heads share all keys; a key's first values are the value."""

    splits_keys = True

    def sizes(self, call: MlaDecodeCall) -> Sizes:
        latent, width = call.latent_dim, call.latent_dim + call.rope_dim
        return Sizes(
            batch=call.batch, kv_heads=1, group=call.heads, queries=call.queries, keys=call.max_keys,
            q=latent, k=width, v=latent, q_rope=call.rope_dim, page=call.page, pages=call.cache.shape[0],
        )  # fmt: skip

    def arguments(self, call: MlaDecodeCall) -> Arguments:
        q, cache, lse = call.q, call.cache, call.lse
        by_page = _bytes(cache, cache.stride(0), cache.stride(1), 0)
        strides = Strides(
            q=_bytes(q, *q.strides[:3]), k=by_page, v=by_page, out=_bytes(call.out, *call.out.strides[:3]),
            lse=_bytes(lse, lse.stride(0), lse.stride(2), lse.stride(1)),
            q_rope=_bytes(q, *call.q_rope.strides[:3]), table=call.table_stride * 4,
        )  # fmt: skip
        tensors = Tensors(
            q=q,
            k=cache,
            v=cache,
            out=call.out,
            lse=lse,
            q_rope=call.q_rope,
            lengths=call.lengths,
            table=call.block_table,
        )
        code = DTYPE_CODES[q.dtype]
        scoring = Scoring(call.softmax_scale, causal=1)
        return Arguments(tensors, strides, self.sizes(call), scoring, Dtypes(code, code, code))


attention, mla = Attention(), Mla()
attention_decode, attention_chunked, mla_decode = AttentionDecode(), AttentionChunked(), MlaDecode()
