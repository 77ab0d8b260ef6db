"""attention_cascade in Triton: tiles and splits of its two passes."""

from dataclasses import dataclass

from tilery.hardware.gpu import ARCHS
from tilery.ops.attention.cascade import Cascade, CascadeCall
from tilery.ops.attention.triton import paged
from tilery.ops.attention.triton.merge import merge_attention


@dataclass(frozen=True)
class Config:
    """First that of the pass over prefixes, then that of the other."""

    prefix_block_m: int  # rows: query tokens times the heads that share keys
    prefix_block_n: int  # keys
    prefix_splits: int
    prefix_num_warps: int
    prefix_num_stages: int
    block_m: int
    block_n: int
    splits: int
    num_warps: int
    num_stages: int

    @property
    def passes(self) -> tuple[paged.Config, paged.Config]:
        prefix = self.prefix_block_m, self.prefix_block_n, self.prefix_splits
        own = self.block_m, self.block_n, self.splits
        return (
            paged.Config(*prefix, self.prefix_num_warps, self.prefix_num_stages),
            paged.Config(*own, self.num_warps, self.num_stages),
        )


class AttentionCascade(Cascade):
    archs = ARCHS
    Config = Config
    passes = paged.attention_chunked, paged.attention_decode
    merge = merge_attention

    def default(self, call: CascadeCall) -> Config:
        return _joined(*self.defaults(call))

    def configs(self, call: CascadeCall) -> list[Config]:
        """Those of one pass beside the other's default: they run one after the other."""
        (prefix, own), (prefixes, owns) = self.defaults(call), self.tried(call)
        found = [*(_joined(c, own) for c in prefixes), *(_joined(prefix, c) for c in owns)]
        return [c for c in dict.fromkeys(found) if self.refusal(call, c) is None]


def _joined(prefix: paged.Config, own: paged.Config) -> Config:
    first = prefix.block_m, prefix.block_n, prefix.splits, prefix.num_warps, prefix.num_stages
    return Config(*first, own.block_m, own.block_n, own.splits, own.num_warps, own.num_stages)


attention_cascade = AttentionCascade()
