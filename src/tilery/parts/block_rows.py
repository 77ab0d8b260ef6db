"""Kernels that give a row to one block: how many threads it has."""

from dataclasses import dataclass

from tilery.hardware.device import ARCHS

archs = ARCHS

THREADS = (32, 64, 128, 256, 512, 1024)  # powers of two: some kernels halve their sums


@dataclass(frozen=True)
class Config:
    threads: int  # in a block


def refusal(config: Config | None) -> str | None:
    if config and config.threads not in THREADS:
        return f"threads must be one of {', '.join(map(str, THREADS))}, got {config.threads}"
    return None


def default(n: int, most: int = 512) -> Config:
    """Sixteen elements a thread, up to `most`: on an H200 CuPy took 70 µs for 4096 × 16384 with 512, 88 with 1024."""
    return Config(next((t for t in THREADS if t * 16 >= n and t <= most), most))


def configs() -> list[Config]:
    return [Config(threads) for threads in THREADS]
