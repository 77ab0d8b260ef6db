"""Tiles for the kernels without tensor cores: a block sums a tile of c, a thread a square of it in registers."""

from dataclasses import dataclass

from tilery.base.spec import TensorSpec, Work
from tilery.hardware.device import ARCHS
from tilery.parts.tiles import tiled_product

archs = ARCHS


@dataclass(frozen=True)
class Config:
    block_m: int
    block_n: int
    block_k: int
    square: int  # a thread sums square × square elements

    @property
    def threads(self) -> int:
        return self.block_m // self.square * (self.block_n // self.square)

    def blocks(self, m: int, n: int) -> int:
        return -(-m // self.block_m) * -(-n // self.block_n)


_CONFIGS = (
    Config(16, 64, 32, 2),
    Config(32, 64, 32, 4),
    Config(64, 64, 16, 4),
    Config(64, 128, 16, 8),
    Config(128, 128, 8, 8),
    Config(128, 128, 16, 8),
)


def refusal(a: TensorSpec, b: TensorSpec, precision: str, config: Config | None = None) -> str | None:
    if config and config not in _CONFIGS:
        return f"the config must be one of {', '.join(map(str, _CONFIGS))}, got {config}"
    return None


def default(a: TensorSpec, b: TensorSpec, precision: str) -> Config:
    m, n = a.shape[0], b.shape[1]
    if m <= 16:
        return _CONFIGS[0]
    return _CONFIGS[5] if m * n >= 2048 * 2048 else _CONFIGS[2]  # small tiles make more blocks


def configs(a: TensorSpec, b: TensorSpec, precision: str) -> list[Config]:
    return list(_CONFIGS)


def estimate(a: TensorSpec, b: TensorSpec, precision: str, config: Config) -> Work:
    return tiled_product(a, b, config.block_m, config.block_n)
