"""Experts in CUDA C++."""
