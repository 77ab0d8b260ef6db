"""Triton kernels that hold a whole row in one program's registers: how many warps that takes."""

from dataclasses import dataclass

import triton

from tilery.device import ARCHS

archs = ARCHS

_WARPS = (1, 2, 4, 8, 16)
_VALUES_PER_LANE = 128  # of 255 registers; the rest hold weights and addresses


@dataclass(frozen=True)
class Config:
    num_warps: int


def refusal(n: int, config: Config | None) -> str | None:
    most = 32 * (config.num_warps if config else _WARPS[-1]) * _VALUES_PER_LANE
    if triton.next_power_of_2(n) > most:
        return f"row of {n} does not fit the registers of one program ({most} values)"
    return None


def default(n: int) -> Config:
    return Config(num_warps=min(max(triton.next_power_of_2(n) // 512, 1), _WARPS[-1]))


def configs(n: int) -> list[Config]:
    return [c for c in map(Config, _WARPS) if refusal(n, c) is None]
