"""Tiles of c over the cores, as parts/numba_products.py has it, and no epilogue."""

from tilery.ops.matmul import outputs, product
from tilery.parts.numba_products import Config, archs, kernel

__all__ = ["Config", "archs", "compile", "configs", "default", "refusal", "run", "workspace"]

refusal, default, configs, workspace, compile, run = kernel(product, outputs)
