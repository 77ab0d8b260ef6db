"""Tiles of c over the cores, as parts/numba_products.py has it, and no epilogue."""

from tilery.ops.matmul import outputs
from tilery.parts.numba_products import Config, archs, kernel
from tilery.parts.products import of_matmul

__all__ = ["Config", "archs", "compile", "configs", "default", "refusal", "run", "workspace"]

refusal, default, configs, workspace, compile, run = kernel(of_matmul, outputs)
