"""y = act(x · weightᵀ + bias) + residual, in the epilogue of one product."""

from tilery.ops.linear import outputs, product
from tilery.parts.numba_products import Config, archs, kernel

__all__ = ["Config", "archs", "compile", "configs", "default", "refusal", "run", "workspace"]

refusal, default, configs, workspace, compile, run = kernel(product, outputs)
