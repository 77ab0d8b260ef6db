"""FlashInfer, which attention, attention_decode and attention_chunked are held against.

Its wrappers plan on the host how the work of given lengths is split, then run as often as one likes. A plan is made
when lengths are first seen, so it is in nobody's time and a CUDA graph captures the run alone. Each wrapper keeps its
plan in an int workspace of its own. What parts of a sequence's keys give is in a float workspace that no plan writes
to: the wrappers of a device share it, as they run one after another.
"""

import functools
import math
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilery.core.peers import Saved, load
from tilery.ops.attention.call import effective_window
from tilery.ops.attention.paged_peers import host_list, max_keys, require_without
from tilery.ops.attention.peers import named

_WHO = "FlashInfer"
_HEAD_DIMS = ((64, 64), (128, 128), (256, 256), (192, 128))  # of keys and of values
_GROUPS = (1, 2, 3, 4, 6, 8, 16)  # of heads that share a key, which its decoding without tensor cores knows
_PAGE = 64  # keys, of a cache in one piece: its plans split keys by pages, so one page would never be split
_WORKSPACE = 128 * 2**20  # bytes, as its documentation asks for

# Its choice for sm_90 is FA3, whose blocks have 128 tokens of one head and all keys: few of them leave SMs idle. FA2
# packs the heads of a group into a block and splits keys.
_BACKENDS = ("auto", "fa2")
_SLEEP_CYCLES = 4_000_000  # 2 ms, in which the host queues the calls that are timed
_CALLS = 10


class _Fastest:
    """Wrappers that have planned the same problem; the one that took the least time when first called runs."""

    def __init__(self, wrappers: list[Any]) -> None:
        self._wrappers = wrappers

    def run(self, *tensors: Any, out: Tensor) -> None:
        if len(self._wrappers) > 1:
            times = [_ms(functools.partial(wrapper.run, *tensors, out=out)) for wrapper in self._wrappers]
            self._wrappers = [self._wrappers[times.index(min(times))]]
        self._wrappers[0].run(*tensors, out=out)


def _ms(run: Callable[[], object]) -> float:
    if not torch.cuda.is_available():
        return 0.0
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()
    torch.cuda._sleep(_SLEEP_CYCLES)
    start.record()
    for _ in range(_CALLS):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


@functools.cache
def _workspace(device: torch.device) -> Tensor:
    return torch.zeros(_WORKSPACE, dtype=torch.uint8, device=device)


# What it takes


def _options(q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int, softcap: float) -> dict[str, Any]:
    """What all plans are told, of a problem that FlashInfer has kernels for."""
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise NotImplementedError(f"{_WHO} takes fp16 and bf16 alone, got {q.dtype}")
    if (dims := (q.shape[-1], v.shape[-1])) not in _HEAD_DIMS:
        raise NotImplementedError(f"{_WHO} has no kernel for heads of {dims[0]} with values of {dims[1]}")
    if scale is not None and scale <= 0:
        raise NotImplementedError(f"{_WHO} takes positive scales alone, got {scale}")
    for x in (q, k, v):
        if any(address % 16 for address in (x.data_ptr(), *(step * x.itemsize for step in x.stride()[:-1]))):
            raise NotImplementedError(f"{_WHO} loads 16 bytes at once, and heads do not begin at multiples of them")
    return {"q_data_type": q.dtype, "sm_scale": scale, "window_left": window - 1, "logits_soft_cap": softcap}


def _starts(cu_seqlens: Tensor, tokens: int, longest: int) -> list[int]:
    starts: list[int] = host_list(cu_seqlens)
    if starts[0] or starts[-1] > tokens or not all(0 <= b - a <= longest for a, b in pairwise(starts)):
        raise NotImplementedError(f"{_WHO} takes valid sequences alone, got cu_seqlens {starts}")
    return starts


def _require_keys(starts: list[int], lengths: Iterable[int]) -> None:
    if any(b - a > keys for (a, b), keys in zip(pairwise(starts), lengths)):
        raise NotImplementedError(f"{_WHO} has no causal mask of more tokens than keys")


def _room(like: Tensor, tokens: int, size: int) -> Tensor:
    """The output: zeros where tokens are of no sequence."""
    shape = *like.shape[:-1], size
    return like.new_empty(shape) if tokens == len(like) else like.new_zeros(shape)


# Whole sequences


def attention(*args: Any) -> Tensor:
    """Tokens of all sequences one after another, or a call for each where they do not lie so."""
    call = named(args)
    extra = {name: getattr(call, name) for name in ("key_mask", "bias", "slopes", "sinks", "q_scale")}
    require_without(_WHO, **extra)
    if call.effective_window and not call.causal:
        raise NotImplementedError(f"{_WHO} has no window without a causal mask")
    options = _options(call.q, call.k, call.v, call.scale, call.effective_window, call.softcap)
    return (_packed if call.packed else _dense)(call, options | {"causal": call.causal})


def _packed(call: Any, options: dict[str, Any]) -> Tensor:
    starts = _starts(call.cu_seqlens_q, len(call.q), call.max_seqlen_q)
    key_starts = _starts(call.cu_seqlens_k, len(call.k), call.max_seqlen_k)
    tokens, keys = starts[-1], key_starts[-1]
    out = _room(call.q, tokens, call.value_dim)
    if tokens:
        sizes = call.heads, call.kv_heads, call.head_dim, call.value_dim
        plan = _ragged(call.q, starts, key_starts, sizes, options)
        plan.run(call.q[:tokens], call.k[:keys], call.v[:keys], out=out[:tokens])
    return out


def _dense(call: Any, options: dict[str, Any]) -> Tensor:
    turned = call.layout == "bhsd"
    q, k, v = (x.transpose(1, 2) if turned else x for x in (call.q, call.k, call.v))
    out = q.new_empty(*q.shape[:-1], call.value_dim)
    if out.numel():
        joined = all(x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1) for x in (q, k, v))
        batch = call.batch if joined else 1
        sizes = call.heads, call.kv_heads, call.head_dim, call.value_dim
        edges = ([x * i for i in range(batch + 1)] for x in (call.queries, call.keys))
        plan = _ragged(call.q, *edges, sizes, options)
        parts = [[x.flatten(0, 1) for x in (q, k, v, out)]] if joined else zip(q, k, v, out)
        for *qkv, into in parts:
            plan.run(*qkv, out=into)
    return out.transpose(1, 2) if turned else out


def _plan_ragged(
    q: Tensor, starts: list[int], key_starts: list[int], sizes: tuple[int, int, int, int], options: dict[str, Any]
) -> _Fastest:
    if options["causal"]:
        _require_keys(starts, [b - a for a, b in pairwise(key_starts)])
    *to_plan, value_dim = sizes
    edges = [torch.tensor(x, dtype=torch.int32) for x in (starts, key_starts)]

    def planned(backend: str) -> Any:
        wrapper = load("flashinfer").BatchPrefillWithRaggedKVCacheWrapper(_workspace(q.device), backend=backend)
        wrapper.plan(*edges, *to_plan, head_dim_vo=value_dim, **options)
        return wrapper

    return _Fastest([planned(backend) for backend in _BACKENDS])


_ragged = Saved(_plan_ragged)


# Caches


def decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, block_table: Tensor | None, k_scale: Any,
    v_scale: Any, sinks: Any, scale: float | None, window: int, softcap: float,
) -> Tensor:  # fmt: skip
    """One token by what it has for decoding; several as a prefill by FA2, which alone splits keys."""
    require_without(_WHO, k_scale=k_scale, v_scale=v_scale, sinks=sinks)
    queries = q.shape[1]
    window = effective_window(window, queries, max_keys(k_cache, block_table))
    options = _options(q, k_cache, v_cache, scale, window, softcap)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if out.numel():
        k, v = (_as_pages(x, block_table) for x in (k_cache, v_cache))
        about = k.shape[:2], (q.shape[2], *k.shape[2:]), options
        if queries == 1:
            plan = _decode(lengths, block_table, *about)
        else:
            plan = _append(lengths, block_table, [*range(0, len(q) * queries + 1, queries)], *about, ("fa2",))
        plan.run(q.view(-1, *q.shape[2:]), (k, v), out=out.view(-1, *q.shape[2:]))
    return out


def chunked(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cu_seqlens_q: Tensor, lengths: Tensor, block_table: Tensor,
    k_scale: Any, v_scale: Any, sinks: Any, scale: float | None, window: int, softcap: float, max_seqlen_q: int,
) -> Tensor:  # fmt: skip
    """The chunks of all sequences as one prefill."""
    require_without(_WHO, k_scale=k_scale, v_scale=v_scale, sinks=sinks)
    starts = _starts(cu_seqlens_q, len(q), max_seqlen_q or len(q))
    window = effective_window(window, len(q), max_keys(k_cache, block_table))
    options = _options(q, k_cache, v_cache, scale, window, softcap)
    tokens = starts[-1]
    out = _room(q, tokens, q.shape[-1])
    if tokens:
        sizes = q.shape[1], *k_cache.shape[2:]
        plan = _append(lengths, block_table, starts, k_cache.shape[:2], sizes, options, _BACKENDS)
        plan.run(q[:tokens], (k_cache, v_cache), out=out[:tokens])
    return out


def _as_pages(cache: Tensor, table: Tensor | None) -> Tensor:
    """A view of a cache in one piece, [B, S, G, D], as [pages, size, G, D]."""
    if table is not None:
        return cache
    sequences, keys = cache.shape[:2]
    if sequences > 1 and keys and cache.stride(0) != keys * cache.stride(1):
        raise NotImplementedError(f"{_WHO} takes a cache whose sequences lie one after another")
    size = math.gcd(keys, _PAGE)
    return cache.view(sequences * keys // size, size, *cache.shape[2:])


def _page_lists(lengths: Tensor, table: Tensor | None, pages: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where the pages of each sequence begin and end in a list of pages, that list, and the keys of each last page.

    A sequence without keys has no page, and none in its last.
    """
    held: list[int] = host_list(lengths)
    table = torch.arange(pages).view(len(held), pages // len(held)) if table is None else table.cpu()
    if not all(0 <= keys <= table.shape[1] * size for keys in held):
        raise NotImplementedError(f"{_WHO} takes lengths that the cache can hold alone, got {held}")
    counts = torch.tensor([-(-keys // size) for keys in held])
    indices = table[torch.arange(table.shape[1]) < counts.unsqueeze(1)]
    if ((indices < 0) | (indices >= pages)).any():
        raise NotImplementedError(f"{_WHO} reads every page of a sequence, and one is not in the cache")
    last = torch.tensor(held) - (counts - 1).clamp(min=0) * size
    indptr, indices, last = (x.to(torch.int32) for x in (F.pad(counts.cumsum(0), (1, 0)), indices, last))
    return indptr, indices, last


def _plan_decode(
    lengths: Tensor, table: Tensor | None, pages: tuple[int, int], sizes: tuple[int, int, int], options: dict[str, Any]
) -> _Fastest:
    """On tensor cores, where it is as a rule faster from 4 heads a group on, and without."""
    where = _page_lists(lengths, table, *pages)

    def planned(tensor_cores: bool) -> Any:
        wrapper_of = load("flashinfer").BatchDecodeWithPagedKVCacheWrapper
        wrapper = wrapper_of(_workspace(lengths.device), "NHD", use_tensor_cores=tensor_cores)
        wrapper.plan(*where, *sizes, pages[1], **options)
        return wrapper

    return _Fastest([planned(True), *([planned(False)] if sizes[0] // sizes[1] in _GROUPS else [])])


def _plan_append(
    lengths: Tensor, table: Tensor | None, starts: list[int], pages: tuple[int, int], sizes: tuple[int, int, int],
    options: dict[str, Any], backends: tuple[str, ...],
) -> _Fastest:  # fmt: skip
    """Plan attention of tokens that are the last of their sequences."""
    _require_keys(starts, host_list(lengths))
    edges, where = torch.tensor(starts, dtype=torch.int32), _page_lists(lengths, table, *pages)

    def planned(backend: str) -> Any:
        wrapper_of = load("flashinfer").BatchPrefillWithPagedKVCacheWrapper
        wrapper = wrapper_of(_workspace(lengths.device), "NHD", backend=backend)
        wrapper.plan(edges, *where, *sizes, pages[1], causal=True, **options)
        return wrapper

    return _Fastest([planned(backend) for backend in backends])


_decode, _append = Saved(_plan_decode), Saved(_plan_append)
