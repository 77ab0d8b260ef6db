"""attention_cascade on the CPU: blocks and chunks of its two passes."""

from dataclasses import dataclass

from tilery.ops.attention.cascade import Cascade, CascadeCall
from tilery.ops.attention.numba import forward
from tilery.ops.attention.numba.merge import merge_attention


@dataclass(frozen=True)
class Config:
    prefix_rows: int  # of a block, in the pass over prefixes
    rows: int
    chunk: int  # own keys that a core takes before their results are combined; 0: all
    parallel: bool

    @property
    def passes(self) -> tuple[forward.Config, forward.Config]:
        return forward.Config(self.prefix_rows, 0, self.parallel), forward.Config(self.rows, self.chunk, self.parallel)


class AttentionCascade(Cascade):
    archs = ("cpu",)
    Config = Config
    passes = forward.attention_chunked, forward.attention_decode
    merge = merge_attention

    def default(self, call: CascadeCall) -> Config:
        prefix, own = self.defaults(call)
        return Config(prefix.rows, own.rows, own.chunk, prefix.parallel or own.parallel)

    def configs(self, call: CascadeCall) -> list[Config]:
        prefixes, owns = self.tried(call)
        rows = dict.fromkeys(c.rows for c in prefixes)
        return [Config(r, c.rows, c.chunk, c.parallel) for r in rows for c in owns]


attention_cascade = AttentionCascade()
