"""TMA, wgmma and warpgroups, as parts/hopper_products.py has them, and no ending."""

from tilery.ops.matmul import outputs, product
from tilery.parts.hopper_products import Config, archs, kernel

__all__ = ["Config", "archs", "compile", "configs", "default", "estimate", "refusal", "run"]

refusal, default, configs, estimate, compile, run = kernel(product, outputs, ("a", "b", ""))
