"""A program per tile of queries; keys and values stream past it."""

from tilery.parts.attention import outputs
from tilery.parts.triton_attention_plan import Config, archs, kernel

__all__ = ["Config", "archs", "compile", "configs", "default", "estimate", "refusal", "run"]

refusal, default, configs, estimate, compile, run = kernel(outputs)
