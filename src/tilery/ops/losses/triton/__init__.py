"""Kernels of cross entropies in Triton."""
