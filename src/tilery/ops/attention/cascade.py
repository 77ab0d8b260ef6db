"""attention_cascade in every language: its calls, and the three kernels of other ops that it is composed of."""

from typing import Any

import torch

from tilery.base.launch import Host, Launch
from tilery.base.spec import TensorSpec
from tilery.core.kernel import Kernel
from tilery.ops.attention.call import PagedCall
from tilery.ops.attention.merge_call import MergeCall


class PrefixCall(PagedCall):
    """The pass over prefixes: query tokens that share one are a packed sequence, and each of them sees all of it."""

    @property
    def causal(self) -> bool:
        return False


class CascadeCall(PagedCall):
    """A call of attention_cascade; as a PagedCall it is one to the sequences' own keys."""

    k_scale: TensorSpec | None
    v_scale: TensorSpec | None
    sinks: TensorSpec | None
    softcap: float
    prefix_lengths: TensorSpec  # [P]
    prefix_table: TensorSpec  # [P, most pages of one]
    cu_prefix_q: TensorSpec  # [P + 1]

    @property
    def window(self) -> int:  # type: ignore[override]
        return 0

    @property
    def prefixes(self) -> int:
        return self.prefix_lengths.shape[0]

    @property
    def max_prefix_keys(self) -> int:
        return self.page * self.prefix_table.shape[1]

    @property
    def even(self) -> bool:
        """Whether the query tokens of all sequences are one row of tokens."""
        sequences, queries = self.q.shape[:2]
        return sequences <= 1 or queries == 1 or self.q.stride(0) == queries * self.q.stride(1)


# The two passes: 0 over prefixes, 1 over the sequences' own keys. Their results [2, T, H, D] are fp32, as is their lse.


def results(call: CascadeCall) -> dict[str, TensorSpec]:
    """Memory for them."""
    shape, where = (2, call.tokens, call.heads), call.q.device
    return {
        "parts": TensorSpec.contiguous((*shape, call.head_dim), torch.float32, where),
        "lses": TensorSpec.contiguous(shape, torch.float32, where),
    }


def pass_of(call: CascadeCall, i: int) -> PagedCall:
    """The call that it is; with its results where there is memory for them."""
    names = "k_cache", "v_cache", "k_scale", "v_scale", "scale", "softcap", "window"
    given, q = {name: getattr(call, name) for name in names}, call.q
    if i:
        given |= {"lengths": call.lengths, "block_table": call.block_table, "sinks": call.sinks}
    else:
        by_token = q.stride(1) if q.shape[1] > 1 else q.stride(0)
        q = q.view((call.tokens, *q.shape[2:]), (by_token, *q.strides[2:]))  # type: ignore[attr-defined]
        given |= {"lengths": call.prefix_lengths, "block_table": call.prefix_table, "cu_seqlens_q": call.cu_prefix_q}
        given |= {"sinks": None, "max_seqlen_q": 0}  # a sink counts once
    if "parts" in call:
        rows, plain = call.tokens * call.heads, TensorSpec.contiguous(q.shape, torch.float32, q.device)
        given["out"] = call.parts.view(q.shape, plain.strides, i * rows * call.head_dim)
        given["lse"] = call.lses.view((call.tokens, call.heads), (call.heads, 1), i * rows)
    return (PagedCall if i else PrefixCall)(given | {"q": q})


def merge_call(call: CascadeCall) -> MergeCall:
    """The call of merge_attention that makes out of both: tokens of all sequences are packed."""
    tokens, heads, size = call.tokens, call.heads, call.head_dim
    if "parts" not in call:
        return MergeCall({"outs": results(call)["parts"], "layout": "thd"})
    lses = call.lses.view((2, heads, tokens), (tokens * heads, 1, heads))
    out = call.out.view((tokens, heads, size), (heads * size, size, 1))
    return MergeCall({"outs": call.parts, "lses": lses, "out": out, "lse": None, "layout": "thd"})


# The kernel


class Cascade(Kernel):
    """A language's kernels of attention_chunked, for prefixes, of attention_decode and of merge_attention.

    Its Config has `passes`, the configs of the first two.
    """

    passes: tuple[Kernel, Kernel]
    merge: Kernel

    def refusal(self, call: Any, config: Any = None) -> str | None:
        configs = (None, None) if config is None else config.passes
        found = (kernel.refusal(pass_of(call, i), configs[i]) for i, kernel in enumerate(self.passes))
        return next((why for why in found if why is not None), None)

    def defaults(self, call: Any) -> tuple[Any, Any]:
        """Default configs of the two passes."""
        prefix, own = (kernel.default(pass_of(call, i)) for i, kernel in enumerate(self.passes))
        return prefix, own

    def tried(self, call: Any) -> tuple[Any, Any]:
        """What a tuner tries for each of the two."""
        prefix, own = (kernel.configs(pass_of(call, i)) for i, kernel in enumerate(self.passes))
        return prefix, own

    def workspace(self, call: Any, config: Any) -> dict[str, TensorSpec]:
        merging = merge_call(call)
        found = results(call) | _named("merge", self.merge.workspace(merging, self.merge.default(merging)))
        for i, kernel in enumerate(self.passes):
            found |= _named(f"pass_{i}", kernel.workspace(pass_of(call, i), config.passes[i]))
        return found

    def launches(self, call: Any, config: Any) -> list[Launch | Host]:
        found: list[Launch | Host] = []
        for i, kernel in enumerate(self.passes):
            found += _launches(call, f"pass_{i}", kernel, pass_of(call, i), config.passes[i])
        merging = merge_call(call)
        return found + _launches(call, "merge", self.merge, merging, self.merge.default(merging))


def _named(which: str, workspace: dict[str, TensorSpec]) -> dict[str, TensorSpec]:
    return {f"{which}_{name}": spec for name, spec in workspace.items()}


def _launches(call: Any, which: str, kernel: Kernel, each: Any, config: Any) -> list[Launch | Host]:
    own = {name: getattr(call, f"{which}_{name}") for name in kernel.workspace(each, config)}
    return kernel.launches(each.extended(own), config)
