"""The masks of Hugging Face models, kept as what they say: causal, a window, which keys are padding."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, ClassVar

from torch import Tensor
from transformers import masking_utils

from tilery.base.errors import BadInput

_OPENED = (
    "this model computes with its attention mask, which tilery keeps as causal, window and padding, not as a tensor; "
    "set attn_implementation='sdpa' or 'eager' for it"
)


@dataclass(frozen=True)
class Mask:
    """A mask for queries that end where the keys end; a model makes it once and hands it to every attention call."""

    queries: int
    keys: int
    causal: bool
    window: int  # a query sees keys nearer than that; 0: all
    seen: Tensor | None  # bool [B, keys], False for padding; None: there is none
    ndim: ClassVar[int] = 4  # by this transformers knows that a mask has been made already

    def to(self, *args: Any, **kwargs: Any) -> "Mask":
        return self if self.seen is None else replace(self, seen=self.seen.to(*args, **kwargs))

    def contiguous(self) -> "Mask":
        return self

    def __getitem__(self, index: Any) -> Any:
        raise BadInput(_OPENED)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(_OPENED)

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        raise BadInput(_OPENED)


def make_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: int | Tensor = 0, kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function, attention_mask: Any = None,
    local_size: int | None = None, allow_is_causal_skip: bool = True, allow_is_bidirectional_skip: bool = False,
    **others: Any,
) -> Mask | Tensor | None:  # fmt: skip
    """What transformers asks for, once in a forward: a Mask; bool [B, 1, queries, keys] where that cannot say it."""
    if isinstance(attention_mask, Mask):
        return attention_mask
    sizes: dict[str, Any] = {"q_length": q_length, "kv_length": kv_length, "q_offset": q_offset, "kv_offset": kv_offset}
    # Whoever allows no mask at all does not compute with it.
    if allow_is_causal_skip or allow_is_bidirectional_skip:
        said = _pattern(mask_function, local_size)
        if said == (False, 0) or (said and _end_together(**sizes)):
            padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
            return Mask(q_length, kv_length, *said, _seen(padding, kv_length, kv_offset))
    return masking_utils.sdpa_mask(
        batch_size=batch_size, **sizes, mask_function=mask_function, attention_mask=attention_mask,
        local_size=local_size, allow_is_causal_skip=False, allow_is_bidirectional_skip=False, **others,
    )  # fmt: skip


def _end_together(q_length: int, kv_length: int, q_offset: int | Tensor, kv_offset: int) -> bool:
    """Whether the last query stands at the last key: not with a static cache, which has room for more."""
    return isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length


def _seen(padding: Tensor | None, keys: int, offset: int) -> Tensor | None:
    if padding is None:
        return None
    seen = padding[:, offset : offset + keys]
    # To look is to wait for the GPU, once in a forward. A mask in vain would cost every layer, and gradients.
    return None if not masking_utils.is_tracing(seen) and bool(seen.all()) else seen


def _pattern(function: Callable[..., Any], local: int | None) -> tuple[bool, int] | None:
    """Causal or not, and the window, of a mask function; None if it is another one."""
    made = masking_utils
    known = {(True, 0): made.causal_mask_function, (False, 0): made.bidirectional_mask_function}
    if local:
        known[True, local] = made.sliding_window_causal_mask_function(local)
        known[False, local + 1] = made.sliding_window_bidirectional_mask_function(local)  # distances up to local
    return next((said for said, other in known.items() if _alike(function, other)), None)


def _alike(a: Any, b: Any) -> bool:
    """Whether two mask functions are of the same code, made from the same numbers."""
    if isinstance(a, FunctionType) and isinstance(b, FunctionType):
        return a is b or (a.__code__ is b.__code__ and _alike(_cells(a), _cells(b)))
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_alike, a, b))
    return isinstance(a, int) and isinstance(b, int) and a == b


def _cells(function: FunctionType) -> tuple[Any, ...]:
    return tuple(cell.cell_contents for cell in function.__closure__ or ())
