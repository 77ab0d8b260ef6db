"""y = act(gate) · up, element by element."""

from tilery.parts.triton_gated import Config, archs, compile, configs, default, refusal, run

__all__ = ["Config", "archs", "compile", "configs", "default", "refusal", "run"]
