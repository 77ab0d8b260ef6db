"""A program per tile of c, as parts/triton_products.py has it, and no epilogue."""

from tilery.ops.matmul import outputs, product
from tilery.parts.triton_products import Config, archs, kernel

__all__ = ["Config", "archs", "compile", "configs", "default", "estimate", "refusal", "run"]

refusal, default, configs, estimate, compile, run = kernel(product, outputs)
