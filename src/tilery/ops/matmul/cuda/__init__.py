"""Kernels of the matmul family in CUDA C++."""
