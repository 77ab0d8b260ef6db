"""TEMPORARY: old place of what is in ops/rope/heads.py."""

from tilery.ops.rope.heads import LAYOUTS, Heads, check_heads, heads, model_sizes  # noqa: F401
