"""TEMPORARY: old place of what is in ops/rope/kv_cache.py."""

from tilery.ops.rope.kv_cache import BLOCK_SIZES, FORMATS, check, draw, draw_slots, stored, write  # noqa: F401
