"""The gradients of gate and up, element by element."""

from tilery.parts.triton_gated import Config, archs, configs, default, refusal
from tilery.parts.triton_gated import compile_backward as compile
from tilery.parts.triton_gated import run_backward as run

__all__ = ["Config", "archs", "compile", "configs", "default", "refusal", "run"]
