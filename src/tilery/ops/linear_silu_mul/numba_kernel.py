"""A program sums a tile of gate and the same tile of up, and stores silu(gate) · up."""

from tilery.ops.linear_silu_mul import outputs, product
from tilery.parts.numba_products import Config, archs, kernel

__all__ = ["Config", "archs", "compile", "configs", "default", "refusal", "run", "workspace"]

refusal, default, configs, workspace, compile, run = kernel(product, outputs)
