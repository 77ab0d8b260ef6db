"""As attention, and the lse is written too."""

from tilery.parts.attention import outputs_lse
from tilery.parts.hopper_attention import Config, archs, kernel

__all__ = ["Config", "archs", "compile", "configs", "default", "estimate", "refusal", "run"]

refusal, default, configs, estimate, compile, run = kernel(outputs_lse)
