"""A program takes a row, or neighbouring groups of 128; the product never leaves registers before it is quantised."""

from tilery.device import ARCHS
from tilery.ops import triton_quantise
from tilery.ops.silu_mul_fp8 import outputs
from tilery.ops.triton_pieces import Config
from tilery.ops.triton_quantise import Call
from tilery.spec import Artifact

archs = ARCHS


def refusal(gate, up, per: str, layout: str, pow2: bool, format: str, config: Config | None = None) -> str | None:
    return triton_quantise.refusal(per, config)


def default(gate, up, per: str, layout: str, pow2: bool, format: str) -> Config:
    return triton_quantise.default(gate.shape[-1] if up is not None else gate.shape[-1] // 2, per)


def configs(gate, up, per: str, layout: str, pow2: bool, format: str) -> list[Config]:
    return triton_quantise.configs(gate.shape[-1] if up is not None else gate.shape[-1] // 2, per)


def _call(outs, config: Config, gate, up, per, layout, pow2, format) -> Call:
    return triton_quantise.call(outs, gate, up, True, per, pow2, format, config)


def compile(specs, config: Config, arch: str) -> Artifact:
    return _call(outputs(*specs), config, *specs).compile(config, arch)


def run(outs, args, config: Config) -> None:
    _call(outs, config, *args).run(config)
