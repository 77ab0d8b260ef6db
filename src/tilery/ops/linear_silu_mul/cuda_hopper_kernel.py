"""A tile has columns of gate and the same of up, and stores silu(gate) · up."""

from tilery.ops.linear_silu_mul import outputs, product
from tilery.parts.hopper_products import GatedConfig as Config
from tilery.parts.hopper_products import archs, kernel

__all__ = ["Config", "archs", "compile", "configs", "default", "estimate", "refusal", "run"]

refusal, default, configs, estimate, compile, run = kernel(product, outputs, ("x", "weight", ""))
