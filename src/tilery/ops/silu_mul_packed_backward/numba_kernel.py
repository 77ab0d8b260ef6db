"""The gradients of gate and up, element by element, side by side."""

from tilery.parts.numba_gated import Config, archs, configs, default, refusal
from tilery.parts.numba_gated import compile_packed_backward as compile
from tilery.parts.numba_gated import run_packed_backward as run

__all__ = ["Config", "archs", "compile", "configs", "default", "refusal", "run"]
