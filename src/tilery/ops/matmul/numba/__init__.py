"""Kernels of the matmul family in Numba."""
