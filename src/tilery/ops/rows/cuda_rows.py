"""CUDA kernels that give rows to thread blocks or clusters of them.

A source has up to three kernels for an op. <op> keeps a row in registers. <op>_reread reads it a second time.
<op>_pipelined lets rows pass through stages in shared memory: the next are loaded while one is worked on.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from tilery.base.launch import Launch, Persistent
from tilery.base.rows import rows
from tilery.base.spec import TensorSpec
from tilery.core.call import Call
from tilery.core.kernel import Kernel
from tilery.hardware.gpu import ARCHS, CLUSTERS, TMA, Gpu, gpu
from tilery.languages.cuda_source import Source, vector_width
from tilery.ops.rows.thread_blocks import THREADS, Blocks, threads, threads_refusal

_CLUSTER_SIZES = (1, 2, 4, 8)
_LONG = 65536  # rows that are worth a cluster on every SM
_CHUNK = 32  # bytes of an input in a stage, for each thread
_SPARE = 1024  # bytes of shared memory that each block has besides its stages


@dataclass(frozen=True)
class Clusters(Blocks):
    cluster: int = 1  # blocks that share a row


@dataclass(frozen=True)
class Config(Clusters):
    in_registers: bool = False  # else the row is read again
    stages: int = 0  # of a pipeline through shared memory

    old_names: ClassVar[dict[str, str]] = {"held": "in_registers", "slots": "stages"}  # in files of tuned configs


def threads_for(n: int, cluster: int) -> int:
    """32 values for each on their own: 8192 × 4096 took 35.1 µs with 128 threads on an H200, 36.1 with 256."""
    share = -(-n // cluster)
    return threads(share if cluster > 1 else share // 2)


# Clusters


def cluster_refusal(x: TensorSpec, config: Clusters | None) -> str | None:
    if config is None:
        return None
    if config.cluster not in _CLUSTER_SIZES:
        return f"cluster must be one of {', '.join(map(str, _CLUSTER_SIZES))}, got {config.cluster}"
    if config.cluster > gpu(x.device).largest_cluster:
        return f"clusters need sm_{CLUSTERS} or later, {x.device} is {gpu(x.device).arch}"
    return threads_refusal(config)


def clusters(x: TensorSpec) -> tuple[int, ...]:
    """How many blocks a cluster may have."""
    return tuple(c for c in _CLUSTER_SIZES if c <= gpu(x.device).largest_cluster)


def spread(x: TensorSpec, busy: int = 0) -> int:
    """Blocks for each row, so that few rows leave few SMs idle; 2048 values and more for each of them.

    `busy`: the most blocks. 16 × 131072 in add_rms_norm took 15.8 µs with 64 of them on an H200, 10.3 with 128.
    """
    m, n, _ = rows(x)
    sms = gpu(x.device).sms
    busy = busy or (sms if n >= _LONG else sms // 2)
    return next((c for c in reversed(clusters(x)) if m * c <= busy and n >= 2048 * c), 1)


def cluster_configs(x: TensorSpec) -> list[Clusters]:
    """With few idle threads."""
    found = [Clusters(t, c) for c in _CLUSTER_SIZES for t in THREADS if t == THREADS[0] or 4 * c * t < x.shape[-1]]
    return [c for c in found if cluster_refusal(x, c) is None]


def fits_registers(x: TensorSpec, config: Clusters, more: int = 1) -> bool:
    """Up to 32 of the 255 registers of a thread hold values, 16 of the 64 that it has among 1024.

    `more`: how many times as much a kernel holds as one that needs the row and weights.
    """
    held = 64 if config.threads == THREADS[-1] else 128
    return more * x.shape[-1] * x.dtype.itemsize <= config.threads * config.cluster * held


# Pipelines


def _has_bulk_copies(card: Gpu) -> bool:
    return card.number >= TMA  # whose bulk copies signal an mbarrier


def _stage_bytes(config: Config, inputs: int) -> int:
    return config.stages * config.threads * _CHUNK * inputs


def _pipelines(inputs: tuple[TensorSpec, ...]) -> list[Config]:
    """With as many stages as shared memory has for one, two or three blocks on an SM."""
    most = gpu(inputs[0].device).shared_per_block - _SPARE
    return [
        Config(threads, cluster, stages=most // each // (threads * _CHUNK * len(inputs)))
        for cluster in _CLUSTER_SIZES[:3]
        for each in (2, 1, 3)
        for threads in (1024, 512, 256)
    ]


def _pipeline_refusal(config: Config, inputs: tuple[TensorSpec, ...]) -> str | None:
    x = inputs[0]
    card = gpu(x.device)
    if not _has_bulk_copies(card):
        return f"a pipeline of rows needs sm_{TMA} or later, {x.device} is {card.arch}"
    if any(vector_width((i,), i.shape[-1], rows(i).stride) == 1 for i in inputs):
        return "rows must start and end at multiples of 16 bytes to pass through a pipeline"
    need, most = _stage_bytes(config, len(inputs)), card.shared_per_block - _SPARE
    if need > most:
        return f"pipeline of {config.stages} stages takes {need} bytes of shared memory, {most} are there"
    least = -(-x.shape[-1] * x.dtype.itemsize // (config.cluster * config.threads * _CHUNK)) + 1
    if config.stages < least:
        return f"a row and one chunk of the next take {least} stages, the pipeline has {config.stages}"
    return None


class CudaRows(Kernel):
    """A kernel whose rows stay in registers, are read again, or pass through a pipeline."""

    archs = ARCHS
    Config = Config
    source: Path  # its stem is the name of the kernel that keeps a row in registers

    def inputs(self, call: Call) -> tuple[TensorSpec, ...]:
        """The arguments that have rows, the one whose rows count first."""
        raise NotImplementedError

    def weight(self, call: Call) -> TensorSpec | None:
        """What is read beside each row, in accesses as wide."""
        return None

    def args(self, call: Call) -> dict[str, Any]:
        """The arguments of all of the source's kernels, by name."""
        raise NotImplementedError

    def refusal(self, call: Call, config: Config | None = None) -> str | None:
        inputs, weight = self.inputs(call), self.weight(call)
        if config and config.stages:
            if config.in_registers:
                return "a row is kept in registers or in stages, not in both"
            if weight is not None and not weight.aligned:
                return "weight must start at a multiple of 16 bytes beside rows that pass through a pipeline"
            if why := _pipeline_refusal(config, inputs):
                return why
        if config and config.in_registers and not fits_registers(inputs[0], config):
            n = inputs[0].shape[-1]
            return f"row of {n} does not fit the registers of {config.cluster} × {config.threads} threads"
        return cluster_refusal(inputs[0], config)

    def default(self, call: Call) -> Config:
        """Keep a few long rows in the registers of clusters, pipeline many, and keep or read again what is left."""
        inputs = self.inputs(call)
        x, n, cluster = inputs[0], inputs[0].shape[-1], spread(inputs[0])
        kept = Config(threads_for(n, cluster), cluster, in_registers=True)
        pipelines = (c for c in _pipelines(inputs) if c.cluster == 1 and self.refusal(call, c) is None)
        pipelined = next(pipelines, None)
        if pipelined and cluster == 1 and n * x.dtype.itemsize >= 2**16:
            return pipelined
        if fits_registers(x, kept):
            return kept
        # 512 × 131072 on an H200: 88 µs, and 99 in a pipeline of two blocks
        return Config(256, clusters(x)[-1]) if len(clusters(x)) > 1 else Config(THREADS[-1])

    def configs(self, call: Call) -> list[Config]:
        """Large blocks where rows are read again."""
        inputs = self.inputs(call)
        found = [Config(c.threads, c.cluster, kept) for c in cluster_configs(inputs[0]) for kept in (True, False)]
        found = [c for c in found if c.in_registers or c.threads >= 256] + _pipelines(inputs)
        return [c for c in dict.fromkeys(found) if self.refusal(call, c) is None]

    def launches(self, call: Call, config: Config) -> list[Any]:
        inputs, weight = self.inputs(call), self.weight(call)
        m, n, _ = rows(inputs[0])
        strides = [rows(each).stride for each in inputs]
        vector = vector_width((*inputs, *([] if weight is None else [weight])), n, *strides)
        constants = {"T": inputs[0].dtype, "THREADS": config.threads, "CLUSTER": config.cluster}
        grid: int | Persistent = m * config.cluster
        name = self.source.stem
        if config.stages:
            name += "_pipelined"
            constants |= {"VECS_PER_THREAD": _CHUNK // 16, "STAGES": config.stages}
            grid = Persistent(m * config.cluster)
        elif config.in_registers:
            vectors = max(-(-n // (vector * config.threads * config.cluster)), 1)
            constants |= {"VEC": vector, "VECS_PER_THREAD": vectors}
        else:
            name += "_reread"
            constants |= {"VEC": vector}
        options = {"threads": config.threads, "shared": _stage_bytes(config, len(inputs))}
        source = Source(self.source, name)
        return [Launch(source, grid, self.args(call), constants, options, cluster=config.cluster, pdl=True)]
