"""y = act(x · weightᵀ + bias) + residual, in the ending of one product."""

from tilery.ops.linear import outputs, product
from tilery.parts.hopper_products import Config, archs, kernel

__all__ = ["Config", "archs", "compile", "configs", "default", "estimate", "refusal", "run"]

refusal, default, configs, estimate, compile, run = kernel(product, outputs, ("x", "weight", "residual"))
