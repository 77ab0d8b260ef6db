"""CUDA kernels that give rows to blocks or clusters of them.

<op> keeps a row in registers, <op>_reread reads it twice, <op>_pipelined loads the next rows into shared memory while
one is worked on.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tilery.base.spec import TensorSpec
from tilery.hardware import device
from tilery.languages import cuda_glue
from tilery.parts import block_rows
from tilery.parts.block_rows import THREADS
from tilery.parts.rows import rows

archs = block_rows.archs

_CLUSTERS = (1, 2, 4, 8)  # more than 8 is not promised
_HOPPER = 90  # the first with clusters and with loads that arrive by themselves
_BUSY = 132  # blocks: one for every processor of an H200
_LONG = 65536  # rows that are worth a cluster on every processor
_CHUNK = 32  # bytes of an input in a slot of the ring, for each thread
_SPARE = 1024  # bytes of shared memory that each block has besides its ring


@dataclass(frozen=True)
class Shared(block_rows.Config):
    cluster: int = 1  # blocks that share a row


@dataclass(frozen=True)
class Config(Shared):
    held: bool = False  # in registers; else the row is read again
    slots: int = 0  # of a ring in shared memory


def shared_refusal(x: TensorSpec, config: Shared | None) -> str | None:
    if config is None:
        return None
    if config.cluster not in _CLUSTERS:
        return f"cluster must be one of {', '.join(map(str, _CLUSTERS))}, got {config.cluster}"
    if config.cluster > 1 and not _is_hopper(x.device):
        return f"clusters need sm_{_HOPPER} or later, {x.device} is {device.arch(x.device)}"
    return block_rows.refusal(config)


def refusal(config: Config | None, *inputs: TensorSpec, weight: TensorSpec | None = None) -> str | None:
    """`inputs`: what has rows; `weight`: what is read beside each of them, in accesses as wide."""
    x = inputs[0]
    if config and config.slots:
        if config.held:
            return "a row is held in registers or in slots, not in both"
        if weight is not None and not weight.aligned:
            return "weight must start at a multiple of 16 bytes beside rows that pass through a ring"
        if why := _ring_refusal(config, inputs):
            return why
    if config and config.held and not fits(x, config):
        return f"row of {x.shape[-1]} does not fit the registers of {config.cluster} × {config.threads} threads"
    return shared_refusal(x, config)


def _ring_refusal(config: Config, inputs: tuple[TensorSpec, ...]) -> str | None:
    x = inputs[0]
    if not _is_hopper(x.device):
        return f"a ring needs sm_{_HOPPER} or later, {x.device} is {device.arch(x.device)}"
    if any(cuda_glue.width((i,), i.shape[-1], rows(i).stride) == 1 for i in inputs):
        return "rows must start and end at multiples of 16 bytes to pass through a ring"
    need, most = ring_bytes(config, len(inputs)), device.shared_limit(device.arch(x.device))
    if need > most:
        return f"ring of {config.slots} slots takes {need} bytes of shared memory, {most} are there"
    least = -(-x.shape[-1] * x.dtype.itemsize // (config.cluster * config.threads * _CHUNK)) + 1
    if config.slots < least:
        return f"a row and one chunk of the next take {least} slots, the ring has {config.slots}"
    return None


def ring_bytes(config: Config, inputs: int) -> int:
    return config.slots * config.threads * _CHUNK * inputs


def _is_hopper(where: Any) -> bool:
    return int(device.arch(where).removeprefix("sm_")) >= _HOPPER


def fits(x: TensorSpec, config: Shared, more: int = 1) -> bool:
    """Up to 32 of the 255 registers of a thread hold values, 16 of the 64 that it has among 1024.

    `more`: how many times as much a kernel holds as one that needs the row and weights.
    """
    held = 64 if config.threads == THREADS[-1] else 128
    return more * x.shape[-1] * x.dtype.itemsize <= config.threads * config.cluster * held


class Launch:
    """The kernel for rows of n, of tensors for a launch and of specs to compile; `inputs` of them have rows."""

    def __init__(
        self, source: Path, parameters: str, tensors: tuple[Any, ...], n: int, stride: int, config: Config, inputs: int
    ) -> None:
        values = cuda_glue.width(tensors, n, stride)
        steps = max(-(-n // (values * config.threads * config.cluster)), 1) if config.held else 0
        self.config = config
        self.kernel = _kernel(source, parameters, tensors[0].dtype, values, steps, config, inputs)

    def run(self, m: int, *arguments: Any) -> None:
        blocks = m * self.config.cluster
        if self.config.slots:
            cluster = self.config.cluster
            blocks = min(blocks, self.kernel.resident() // cluster * cluster)
        self.kernel.launch(blocks, *arguments)


@functools.cache  # few: rows of many lengths share an instance
def _kernel(
    source: Path, parameters: str, dtype: torch.dtype, values: int, steps: int, config: Config, inputs: int
) -> cuda_glue.Kernel:
    threads, cluster = config.threads, config.cluster
    sizes: tuple[int, ...] = (values, threads, cluster)
    if config.slots:
        form, sizes = "_pipelined", (_CHUNK // 16, threads, cluster, config.slots)
    elif config.held:
        form, sizes = "", (values, steps, threads, cluster)
    else:
        form = "_reread"
    instance = f"{source.stem}{form}<{cuda_glue.TYPES[dtype]}, {', '.join(map(str, sizes))}>"
    return cuda_glue.Kernel(source, instance, parameters, threads, ring_bytes(config, inputs), cluster, early=True)


def default(*inputs: TensorSpec, weight: TensorSpec | None = None) -> Config:
    """A few long rows in the registers of clusters, many in a ring, what is left in registers or read again."""
    x = inputs[0]
    n, cluster = x.shape[-1], spread(x)
    held = Config(threads_for(n, cluster), cluster, held=True)
    rings = (c for c in _rings(inputs) if c.cluster == 1 and refusal(c, *inputs, weight=weight) is None)
    ring = next(rings, None)
    if ring and cluster == 1 and n * x.dtype.itemsize >= 2**16:
        return ring
    if fits(x, held):
        return held
    # 512 × 131072 on an H200: 88 µs, and 99 in a ring of two blocks
    return Config(256, _CLUSTERS[-1]) if _is_hopper(x.device) else Config(THREADS[-1])


def spread(x: TensorSpec, busy: int = 0) -> int:
    """Blocks for each row, so that few rows leave few processors idle; 2048 values and more for each of them.

    `busy`: the most blocks. 16 × 131072 in add_rms_norm took 15.8 µs with 64 of them on an H200, 10.3 with 128.
    """
    m, n, _ = rows(x)
    busy = busy or (_BUSY if n >= _LONG else _BUSY // 2)
    fitting = (c for c in reversed(_CLUSTERS) if m * c <= busy and n >= 2048 * c)
    return next(fitting, 1) if _is_hopper(x.device) else 1


def threads_for(n: int, cluster: int) -> int:
    """32 values for each on their own: 8192 × 4096 took 35.1 µs with 128 threads on an H200, 36.1 with 256."""
    share = -(-n // cluster)
    return block_rows.default(share if cluster > 1 else share // 2, most=512).threads


def clusters(x: TensorSpec) -> tuple[int, ...]:
    """Of how many blocks they may be."""
    return _CLUSTERS if _is_hopper(x.device) else (1,)


def shared_configs(x: TensorSpec) -> list[Shared]:
    """Few idle threads."""
    found = [Shared(t, c) for c in _CLUSTERS for t in THREADS if t == THREADS[0] or 4 * c * t < x.shape[-1]]
    return [c for c in found if shared_refusal(x, c) is None]


def _rings(inputs: tuple[TensorSpec, ...]) -> list[Config]:
    """As many slots as shared memory has for one, two or three blocks on a processor."""
    most = device.shared_limit(device.arch(inputs[0].device)) - _SPARE
    return [
        Config(threads, cluster, slots=most // each // (threads * _CHUNK * len(inputs)))
        for cluster in _CLUSTERS[:3]
        for each in (2, 1, 3)
        for threads in (1024, 512, 256)
    ]


def configs(*inputs: TensorSpec, weight: TensorSpec | None = None) -> list[Config]:
    """Large blocks where rows are read again."""
    found = [Config(c.threads, c.cluster, held) for c in shared_configs(inputs[0]) for held in (True, False)]
    found = [c for c in found if c.held or c.threads >= 256] + _rings(inputs)
    return [c for c in dict.fromkeys(found) if refusal(c, *inputs, weight=weight) is None]
