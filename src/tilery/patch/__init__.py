"""Tilery inside of Hugging Face models. `tilery.patch(model)` replaces what it can in one of them.

architectures (the table) · apply, application (patch and undo by it) · forwards, experts (what patched modules
compute) · joined (weights in one buffer) · swap (another forward for one instance) · verify (the proof) · audits
(what ran) · report · loss (in training) · infer, document (two commands) · attention (the function they call) ·
attention_masks (what they pass it)
"""

import sys
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tilery.base.errors import ToolMissing

if TYPE_CHECKING:
    from tilery.patch.audits import Audit
    from tilery.patch.report import PatchReport

NEEDS = "5.17"  # of transformers; before it, masks were asked for by other arguments


def register_attention() -> None:
    """Makes attn_implementation="tilery" known to Hugging Face's transformers; docs/huggingface.md has the rest."""
    transformers = require_transformers()
    from tilery.patch.attention import forward
    from tilery.patch.attention_masks import make_mask

    transformers.AttentionInterface.register("tilery", forward)
    transformers.AttentionMaskInterface.register("tilery", make_mask)


def unpatch(model: Any) -> None:
    """Takes tilery.patch back: the model's modules and weights are bit for bit what they were."""
    require_transformers()
    from tilery.patch import apply

    apply.unpatch(model)


def audit(strict: bool | None = None) -> "AbstractContextManager[Audit]":
    """After `with tilery.audit() as a:`, a says which op ran in each layer of patched models, and what stayed in torch.

    `strict` raises at the end if a part that is patched did not run; if not given, for models patched with strict=True.
    """
    require_transformers()
    from tilery.patch import audits

    return audits.audit(strict)


def require_transformers() -> Any:
    """transformers, of a version that this works with."""
    try:
        import transformers
    except ModuleNotFoundError:
        raise ToolMissing("transformers is not installed: pip install 'tilery[hf]'") from None
    if tuple(map(int, transformers.__version__.split(".")[:2])) < tuple(map(int, NEEDS.split("."))):
        came = transformers.__version__
        raise ToolMissing(f"transformers {NEEDS} or later is needed, got {came}: pip install 'tilery[hf]'")
    return transformers


class _Patch(ModuleType):
    """This package, which is also what `tilery.patch(model)` calls."""

    def __call__(
        self, model: Any, ops: str | Iterable[str] | None = None, backend: str | Mapping[str, str] | None = None,
        strict: bool = False, verify: bool = False,
    ) -> "PatchReport":  # fmt: skip
        """Replaces what it can in this model, a live one of transformers, and reports what it replaced and left.

        `ops`: some of norms, rope, mlp, qkv, experts, attention and loss; all but loss if not given. `backend`: the
        kernel of every op, or of each by its name. `strict` raises if anything asked for stays in torch. `verify` holds
        every layer against float32 and raises if a patched one is further off than it may be. Whatever is raised, the
        model is as it was.
        """
        require_transformers()
        from tilery.patch import apply

        return apply.patch(model, ops, backend, strict, verify)


sys.modules[__name__].__class__ = _Patch
