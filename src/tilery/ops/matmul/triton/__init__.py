"""Kernels of the matmul family in Triton."""
