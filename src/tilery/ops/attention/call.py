"""Calls of attention's ops: the sizes, strides and flags that contracts and kernels ask for.

Whole sequences have S queries and T keys each, H query heads and G key heads, heads of D and values of E. A group of
H / G query heads shares a key head. Caches hold keys in pages, or those of each sequence in one piece.
"""

from typing import Any, NamedTuple

from tilery.base.integers import ceil_div
from tilery.base.launch import Scalar
from tilery.base.spec import DTYPES, TensorSpec, dtype_name
from tilery.core.call import Call

LAYOUTS = {"bshd": (0, 1, 2), "bhsd": (0, 2, 1), "thd": (None, 0, 1)}  # dimensions of sequences, tokens and heads
FP8 = (DTYPES["e4m3"], DTYPES["e5m2"])
_SMALLEST = 2.0**-126  # positive number of fp32 that is not denormal


class Strides(NamedTuple):
    """Elements from one sequence (or page), token and head to the next."""

    sequence: int
    token: int
    head: int


def effective_window(window: int, queries: int, keys: int) -> int:
    """The window of so many queries and keys; 0 where it masks none of them, so that kernels add no huge number."""
    return 0 if window >= queries + keys else window


def broadcast_stride(x: TensorSpec | None, dim: int) -> int:
    """Stride along a dimension; 0 where it has one entry for all, or where there is no tensor."""
    return 0 if x is None or x.shape[dim] == 1 else x.stride(dim)


def visible_pairs(queries: int, keys: int, causal: bool, window: int) -> int:
    """Pairs of a query and a key that it sees, in one sequence and head."""

    def below(shift: int) -> int:
        """The keys up to a query's position + shift, summed over the queries."""

        def ramp(x: int) -> int:
            return 0 if x <= 0 else x * (x + 1) // 2 if x <= keys else keys * (keys + 1) // 2 + (x - keys) * keys

        return ramp(keys - 1 + shift) - ramp(keys - queries - 1 + shift)

    last = 1 if causal else window
    return (below(last) if last else queries * keys) - (below(1 - window) if window else 0)


FEW_SPLITS = 8  # a sequence with more splits than these has twice the least number of keys in each


def max_splits(splits: int, keys: int, min_keys: int) -> int:
    """Number of splits that have a key where sequences have at most `keys`, by the rule that kernels split them with.

    A split has `min_keys` keys or more, and twice as many where there are FEW_SPLITS all the same.
    """
    return max(min(splits, ceil_div(keys, min_keys), max(FEW_SPLITS, ceil_div(keys, 2 * min_keys))), 1)


class _HeadsCall(Call):
    """What all of these calls have."""

    @property
    def lse(self) -> Any:
        """None where it is not asked for."""
        return self._values.get("lse")

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.kv_heads

    @property
    def softmax_scale(self) -> Scalar:
        """The factor of scores: the given one, or 1 / sqrt of a head's size where that is None."""
        default = self.head_dim**-0.5
        return self.scale.then(lambda given: default if given is None else given)

    @property
    def scale_is_positive(self) -> Scalar:
        """Whether the factor is positive in fp32 too, where a tiny one would be 0."""
        return self.softmax_scale.then(lambda scale: scale >= _SMALLEST)


class AttentionCall(_HeadsCall):
    """A call of attention or attention_lse. Packed sequences (layout thd) begin and end where cu_seqlens say."""

    q: TensorSpec  # in contracts' backward and indices the tensors themselves
    k: TensorSpec
    v: TensorSpec
    cu_seqlens_q: TensorSpec | None
    cu_seqlens_k: TensorSpec | None
    scale: Scalar
    causal: bool
    window: int
    softcap: float
    layout: str
    max_seqlen_q: int
    max_seqlen_k: int

    @property
    def packed(self) -> bool:
        return self.layout == "thd"

    @property
    def batch(self) -> int:
        """Sequences."""
        return self.q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    @property
    def heads(self) -> int:
        return self._size(self.q, 2)

    @property
    def kv_heads(self) -> int:
        return self._size(self.k, 2)

    @property
    def tokens(self) -> int:
        """Query tokens of a sequence, or of all packed ones."""
        return self._size(self.q, 1)

    @property
    def key_tokens(self) -> int:
        return self._size(self.k, 1)

    @property
    def queries(self) -> int:
        """Queries of a sequence, of packed ones at most: none has more tokens than there are."""
        return min(self.max_seqlen_q, self.tokens) if self.packed else self.tokens

    @property
    def keys(self) -> int:
        return min(self.max_seqlen_k, self.key_tokens) if self.packed else self.key_tokens

    @property
    def head_dim(self) -> int:
        return self.q.shape[-1]

    @property
    def value_dim(self) -> int:
        return self.v.shape[-1]

    @property
    def is_fp8(self) -> bool:
        return self.q.dtype in FP8

    @property
    def effective_window(self) -> int:
        return effective_window(self.window, self.queries, self.keys)

    def strides(self, x: TensorSpec) -> Strides:
        """Strides of one of the call's tensors; all packed sequences are one."""
        return Strides(*(0 if dim is None else x.stride(dim) for dim in LAYOUTS[self.layout]))

    def sizes(self, x: TensorSpec) -> tuple[int, int, int]:
        """Sequences, tokens and heads of one of the call's tensors; all packed sequences are one."""
        sequences, tokens, heads = (self._size(x, axis) for axis in range(3))
        return sequences, tokens, heads

    def _size(self, x: TensorSpec, axis: int) -> int:
        dim = LAYOUTS[self.layout][axis]
        return 1 if dim is None else x.shape[dim]

    # What it costs

    @property
    def visible_pairs(self) -> int:
        """Pairs of a query and a key that it sees, in all sequences and heads.

        Packed sequences count as if all were as long: their lengths are on the device.
        """
        queries, keys = self.queries, self.keys
        if self.packed:
            queries, keys = (ceil_div(tokens, max(self.batch, 1)) for tokens in (self.tokens, self.key_tokens))
        return self.batch * self.heads * visible_pairs(queries, keys, self.causal, self.effective_window)

    def keys_of_tile(self, block: int) -> int:
        """Keys that a tile of queries in the middle of its sequence loads, in blocks: about half if it is causal."""
        pairs = visible_pairs(self.queries, self.keys, self.causal, self.effective_window)
        return min(self.keys, ceil_div(pairs, max(self.queries, 1)) + block)


class UnwindowedCall(AttentionCall):
    """A call of an op without windows, and without anything that is added to scores."""

    @property
    def effective_window(self) -> int:
        return 0


class BackwardCall(AttentionCall):
    """A call of attention_backward."""

    @property
    def lse_strides(self) -> Strides:
        """Strides of lse, dlse and what is kept beside them: [B, H, S], packed [H, T]."""
        return Strides(0 if self.packed else self.heads * self.tokens, 1, self.tokens)


class SinksBackwardCall(BackwardCall):
    """A call of attention_sinks_backward: it has dout where others have queries, and packed tokens are one sequence."""

    dout: TensorSpec

    @property
    def q(self) -> TensorSpec:  # type: ignore[override]
        return self.dout

    @property
    def value_dim(self) -> int:
        return self.dout.shape[-1]

    @property
    def batch(self) -> int:
        return 1 if self.packed else self.dout.shape[0]


class MlaCall(UnwindowedCall):
    """A call of mla: heads of q and k have two parts, the second one turned by RoPE."""

    q_rope: TensorSpec
    k_rope: TensorSpec

    @property
    def head_dim(self) -> int:
        return self.q.shape[-1] + self.rope_dim

    @property
    def rope_dim(self) -> int:
        return self.q_rope.shape[-1]


class PagedCall(_HeadsCall):
    """A call of attention_decode, q [B, Q, H, D], or of attention_chunked, whose queries are packed: q [T, H, D]."""

    q: TensorSpec
    k_cache: TensorSpec  # [pages, page, G, D] with a block_table [B, most pages of one], else [B, T, G, D]
    v_cache: TensorSpec
    lengths: TensorSpec  # [B]
    block_table: TensorSpec | None
    scale: Scalar
    window: int
    max_seqlen_q: int  # of attention_chunked

    @property
    def causal(self) -> bool:
        """Whether the last query is at the last key; if not, all queries see all keys."""
        return True

    @property
    def cu_seqlens_q(self) -> Any:
        """Where the queries of each sequence begin and end; None where all sequences have as many."""
        return self._values.get("cu_seqlens_q")

    @property
    def key_cache(self) -> TensorSpec:
        return self.k_cache

    @property
    def batch(self) -> int:
        """Sequences."""
        return self.lengths.shape[0]

    @property
    def queries(self) -> int:
        """Query tokens of a sequence, at most."""
        if self.cu_seqlens_q is None:
            return self.q.shape[1]
        return min(self.max_seqlen_q, self.q.shape[0]) if self.max_seqlen_q else self.q.shape[0]

    @property
    def tokens(self) -> int:
        """Query tokens of all sequences."""
        return self.q.shape[0] * (self.q.shape[1] if self.cu_seqlens_q is None else 1)

    @property
    def heads(self) -> int:
        return self.q.shape[-2]

    @property
    def kv_heads(self) -> int:
        return self.k_cache.shape[2]

    @property
    def rows(self) -> int:
        """Rows of a sequence and a key head, at most: its query tokens times the heads of a group."""
        return self.queries * self.group

    @property
    def head_dim(self) -> int:
        return self.q.shape[-1]

    @property
    def page(self) -> int:
        """Tokens of a page; 0 where each sequence is in one piece."""
        return 0 if self.block_table is None else self.key_cache.shape[1]

    @property
    def max_keys(self) -> int:
        """Keys that a sequence may have."""
        return self.key_cache.shape[1] * (1 if self.block_table is None else self.block_table.shape[1])

    @property
    def visible_keys(self) -> int:
        """Keys that any query of a sequence sees, at most."""
        window = self.effective_window
        return min(self.max_keys, self.queries + window - 1) if window else self.max_keys

    @property
    def effective_window(self) -> int:
        return effective_window(self.window, self.queries, self.max_keys)

    @property
    def fp8_format(self) -> str | None:
        """e4m3 or e5m2 where the cache is fp8; None where it is of q's dtype."""
        return dtype_name(self.key_cache.dtype) if self.key_cache.dtype in FP8 else None

    @property
    def q_strides(self) -> Strides:
        return Strides(*([] if self.cu_seqlens_q is None else [0]), *self.q.strides[:-1])

    @property
    def table_stride(self) -> int:
        """Entries of the block table from one sequence to the next."""
        return 0 if self.block_table is None else self.block_table.stride(0)


class MlaDecodeCall(PagedCall):
    """A call of mla_decode: all heads share one key of latent and rope, whose latent is the value too."""

    q_rope: TensorSpec
    cache: TensorSpec  # [pages, page, L + R] with a block_table, else [B, T, L + R]

    @property
    def key_cache(self) -> TensorSpec:
        return self.cache

    @property
    def kv_heads(self) -> int:
        return 1

    @property
    def effective_window(self) -> int:
        return 0

    @property
    def latent_dim(self) -> int:
        return self.q.shape[-1]

    @property
    def rope_dim(self) -> int:
        return self.q_rope.shape[-1]
