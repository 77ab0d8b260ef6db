"""Tilery inside of Hugging Face models: attention (the function they call) · attention_masks (what they pass it)."""

from tilery.base.errors import ToolMissing

NEEDS = "5.17"  # of transformers; before it, masks were asked for by other arguments


def register_attention() -> None:
    """Makes attn_implementation="tilery" known to Hugging Face's transformers; docs/huggingface.md has the rest."""
    try:
        import transformers
    except ModuleNotFoundError:
        raise ToolMissing("transformers is not installed: pip install 'tilery[hf]'") from None
    if tuple(map(int, transformers.__version__.split(".")[:2])) < tuple(map(int, NEEDS.split("."))):
        came = transformers.__version__
        raise ToolMissing(f"transformers {NEEDS} or later is needed, got {came}: pip install 'tilery[hf]'")
    from tilery.patch.attention import forward
    from tilery.patch.attention_masks import make_mask

    transformers.AttentionInterface.register("tilery", forward)
    transformers.AttentionMaskInterface.register("tilery", make_mask)
