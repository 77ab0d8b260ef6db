"""Rotary position embedding (RoPE) of queries and keys: plain, in place, after a norm, and on the way to a KV cache."""
