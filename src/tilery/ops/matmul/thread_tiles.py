"""matmul without tensor cores, in CuPy and Numba-CUDA: a block sums a tile of c, a thread a square in registers."""

from dataclasses import dataclass
from typing import Any, ClassVar

from tilery.base.spec import Work
from tilery.core.kernel import Kernel
from tilery.hardware.gpu import ARCHS
from tilery.ops.matmul.call import gemm_work


@dataclass(frozen=True)
class Config:
    block_m: int
    block_n: int
    block_k: int
    thread_tile: int  # a thread sums thread_tile × thread_tile elements

    old_names: ClassVar[dict[str, str]] = {"square": "thread_tile"}  # in files of tuned configs

    @property
    def threads(self) -> int:
        return self.block_m // self.thread_tile * (self.block_n // self.thread_tile)

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


class ThreadTiles(Kernel):
    """All but the launches, for calls that are a `MatmulCall`."""

    archs = ARCHS
    Config = Config

    def refusal(self, call: Any, config: Any = None) -> str | None:
        if config and config not in _CONFIGS:
            return f"the config must be one of {', '.join(map(str, _CONFIGS))}, got {config}"
        return None

    def default(self, call: Any) -> Any:
        if call.m <= 16:
            return _CONFIGS[0]
        return _CONFIGS[5] if call.m * call.n >= 2048 * 2048 else _CONFIGS[2]  # small tiles make more blocks

    def configs(self, call: Any) -> list[Any]:
        return list(_CONFIGS)

    def estimate(self, call: Any, config: Any) -> Work:
        return gemm_work(call.m, call.n, call.k, call.a.dtype.itemsize, config.block_m, config.block_n)

    def args(self, call: Any) -> dict[str, Any]:
        """The arguments of both kernels."""
        sizes = {"m": call.m, "n": call.n, "k": call.k}
        (a_m, a_k), (b_k, b_n) = call.a_strides, call.b_strides
        strides = {"a_m": a_m, "a_k": a_k, "b_k": b_k, "b_n": b_n}
        return {"a": call.a, "b": call.b, "c": call.c, **sizes, **strides}
