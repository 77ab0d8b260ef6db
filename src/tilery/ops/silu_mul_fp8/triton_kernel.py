"""A program takes a row, or neighbouring groups of 128; the product never leaves registers before it is quantised."""

from tilery.base.spec import Artifact
from tilery.hardware.device import ARCHS
from tilery.ops.silu_mul_fp8 import outputs
from tilery.parts import triton_quantise
from tilery.parts.gated import pair
from tilery.parts.rows import rows
from tilery.parts.triton_pieces import Config
from tilery.parts.triton_quantise import Call

archs = ARCHS


def refusal(gate, up, per: str, layout: str, pow2: bool, format: str, config: Config | None = None) -> str | None:
    return triton_quantise.refusal(per, config)


def default(gate, up, per: str, layout: str, pow2: bool, format: str) -> Config:
    m, k, _ = rows(pair(gate, up)[0])
    return triton_quantise.default(m, k, per)


def configs(gate, up, per: str, layout: str, pow2: bool, format: str) -> list[Config]:
    return triton_quantise.configs(pair(gate, up)[0].shape[-1], per)


def _call(outs, config: Config, gate, up, per, layout, pow2, format) -> Call:
    return triton_quantise.call(outs, gate, up, True, per, pow2, format, config)


def compile(specs, config: Config, arch: str) -> Artifact:
    return _call(outputs(*specs), config, *specs).compile(config, arch)


def run(outs, args, config: Config) -> None:
    _call(outs, config, *args).run(config)
