"""A program sums a tile of gate and the same tile of up, and stores silu(gate) · up."""

from tilery.ops.linear_silu_mul import outputs, product
from tilery.parts.triton_products import Config, archs, kernel

__all__ = ["Config", "archs", "compile", "configs", "default", "estimate", "refusal", "run"]

refusal, default, configs, estimate, compile, run = kernel(product, outputs)
