"""silu_mul in CUDA C++: a block takes a part of one row, or of all rows at once where they lie end to end."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tilery.base.launch import Launch
from tilery.core.kernel import Kernel
from tilery.hardware.gpu import ARCHS
from tilery.languages.cuda_source import Source, vector_width
from tilery.ops.gated.call import GatedCall

_SOURCE = Path(__file__).with_name("silu_mul.cu")


@dataclass(frozen=True)
class Config:
    threads: int  # in a block
    vecs_per_thread: int  # accesses of each thread, of 16 bytes where rows allow it

    old_names: ClassVar[dict[str, str]] = {"steps": "vecs_per_thread"}  # in files of tuned configs


class SiluMul(Kernel):
    archs = ARCHS
    Config = Config

    def refusal(self, call: GatedCall, config: Config | None = None) -> str | None:
        if config and (config.threads % 32 or not 32 <= config.threads <= 1024):
            return f"threads must be a multiple of 32 up to 1024, got {config.threads}"
        if config and not 1 <= config.vecs_per_thread <= 8:
            return f"vecs_per_thread must be 1 to 8, got {config.vecs_per_thread}"
        return None

    def default(self, call: GatedCall) -> Config:
        return Config(threads=256, vecs_per_thread=1)

    def configs(self, call: GatedCall) -> list[Config]:
        return [Config(t, v) for t, v in ((128, 1), (128, 4), (256, 1), (256, 2), (256, 4), (512, 1), (512, 2))]

    def launches(self, call: GatedCall, config: Config) -> list[Launch]:
        gate, up = call.halves
        m, n, gate_stride, up_stride = call.flat_rows
        vector = vector_width((gate, up), n, gate_stride, up_stride)
        blocks_per_row = -(-n // (vector * config.vecs_per_thread * config.threads))
        args = {"gate": gate, "up": up, "y": call.y, "gate_stride": gate_stride, "up_stride": up_stride}
        args |= {"n": n, "blocks_per_row": blocks_per_row}
        constants = {"T": gate.dtype, "VEC": vector, "VECS_PER_THREAD": config.vecs_per_thread}
        constants |= {"THREADS": config.threads}
        options = {"threads": config.threads}
        return [Launch(Source(_SOURCE, "silu_mul"), m * blocks_per_row, args, constants, options, pdl=True)]


silu_mul = SiluMul()
