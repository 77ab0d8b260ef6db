"""Cross entropy of logits, and of logits = x · weightᵀ that are never stored; with their backwards."""
