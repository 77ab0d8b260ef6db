"""What kernels ask of a call of a rotary op."""

from functools import cached_property
from typing import Any, NamedTuple

from tilery.core.call import Call


class Heads(NamedTuple):
    batch: int
    tokens: int  # in a sequence
    heads: int
    size: int
    strides: tuple[int, int, int]  # elements from one sequence, token, head to the next


def heads(x: Any, layout: str) -> Heads:
    """Sizes and strides of a tensor or a spec that passed `check_heads`; packed tokens are one sequence."""
    shape, stride = x.shape, x.stride
    if layout == "thd":
        return Heads(1, shape[0], shape[1], shape[2], (0, stride(0), stride(1)))
    token, head = (1, 2) if layout == "bshd" else (2, 1)
    return Heads(shape[0], shape[token], shape[head], shape[3], (stride(0), stride(token), stride(head)))


class RopeCall(Call):
    """A call with q and k, cos, sin and positions. Ops whose arguments have other names say here which they are."""

    @cached_property
    def q_heads(self) -> Heads:
        return heads(self.q, self.layout)

    @cached_property
    def k_heads(self) -> Heads:
        return heads(self.k, self.layout)

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return self.q_heads.batch * self.q_heads.tokens

    @property
    def half(self) -> int:
        """Pairs of a head that are rotated: R / 2."""
        found: int = self.cos.shape[1]
        return found


class CacheWriteCall(RopeCall):
    """Tokens are packed."""

    layout = "thd"
