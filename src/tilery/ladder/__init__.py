"""The HGEMM ladder: a matrix product in CUDA C++ from naive to the shipped kernel, one idea a rung (docs/ladder.md)."""
