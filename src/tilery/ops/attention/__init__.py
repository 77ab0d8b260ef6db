"""Attention: of whole sequences with its backward, of queries to a paged KV cache, and multi-head latent attention."""
