"""TMA, wgmma and warp roles for sm_90: softmax of one warpgroup while another multiplies."""

from tilery.parts.attention import outputs
from tilery.parts.hopper_attention import Config, archs, kernel

__all__ = ["Config", "archs", "compile", "configs", "default", "estimate", "refusal", "run"]

refusal, default, configs, estimate, compile, run = kernel(outputs)
