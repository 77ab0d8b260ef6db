"""Attention in Numba, for the CPU."""
