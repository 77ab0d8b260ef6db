"""Softmax over the last axis, its logarithm, and their backwards."""
