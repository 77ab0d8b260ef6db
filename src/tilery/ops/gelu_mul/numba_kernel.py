"""y = act(gate) · up, element by element."""

from tilery.parts.numba_gated import Config, archs, compile, configs, default, refusal, run

__all__ = ["Config", "archs", "compile", "configs", "default", "refusal", "run"]
