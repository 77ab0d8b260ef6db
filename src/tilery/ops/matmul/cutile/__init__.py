"""Kernels of the matmul family in cuTile."""
