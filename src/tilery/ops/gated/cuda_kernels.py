"""silu_mul in CUDA C++: every block takes a part of one row, or of all rows at once where they lie end to end."""

from dataclasses import dataclass
from pathlib import Path

from tilery.base.launch import Launch
from tilery.core.kernel import Kernel
from tilery.hardware.gpu import ARCHS
from tilery.languages.cuda_glue import Source, vector_width
from tilery.ops.gated.contract import GatedCall

_SOURCE = Path(__file__).with_name("silu_mul.cu")


@dataclass(frozen=True)
class Config:
    threads: int  # in a block
    steps: int  # accesses of each thread


class SiluMul(Kernel):
    archs = ARCHS
    Config = Config

    def refusal(self, call: GatedCall, config: Config | None = None) -> str | None:
        if config and (config.threads % 32 or not 32 <= config.threads <= 1024):
            return f"threads must be a multiple of 32 up to 1024, got {config.threads}"
        if config and not 1 <= config.steps <= 8:
            return f"steps must be 1 to 8, got {config.steps}"
        return None

    def default(self, call: GatedCall) -> Config:
        return Config(threads=256, steps=1)

    def configs(self, call: GatedCall) -> list[Config]:
        return [Config(t, s) for t, s in ((128, 1), (128, 4), (256, 1), (256, 2), (256, 4), (512, 1), (512, 2))]

    def launches(self, call: GatedCall, config: Config) -> list[Launch]:
        gate, up = call.halves
        m, n, gate_stride, up_stride = call.flat_rows
        vector = vector_width((gate, up), n, gate_stride, up_stride)
        pieces = -(-n // (vector * config.steps * config.threads))
        args = {"gate": gate, "up": up, "y": call.y, "gate_stride": gate_stride, "up_stride": up_stride}
        args |= {"n": n, "pieces": pieces}
        constants = {"T": gate.dtype, "VEC": vector, "STEPS": config.steps, "THREADS": config.threads}
        options = {"threads": config.threads}
        return [Launch(Source(_SOURCE, "silu_mul"), m * pieces, args, constants, options, pdl=True)]


silu_mul = SiluMul()
