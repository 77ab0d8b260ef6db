"""A warp, a block or a cluster reads a row once; every thread keeps a maximum and sums of its own until the end."""

import functools
from dataclasses import dataclass
from pathlib import Path

import torch

from tilery.base.spec import Artifact, TensorSpec
from tilery.languages import cuda_glue
from tilery.parts import cuda_rows
from tilery.parts.block_rows import THREADS
from tilery.parts.losses import FEW
from tilery.parts.rows import rows

archs = cuda_rows.archs

_SOURCE = Path(__file__).with_name("cross_entropy.cu")
_PROCESSORS = 132  # of an H200
_ALONE = 8192  # longer rows are for clusters where there are few
_ROWS = (1, 2, 4, 8)
_WARP = THREADS[0]


@dataclass(frozen=True)
class Config(cuda_rows.Shared):
    rows: int = 1  # of a block, where each is a warp's


def refusal(logits: TensorSpec, targets: TensorSpec, config: Config | None = None) -> str | None:
    if config and config.rows not in _ROWS:
        return f"rows must be one of {', '.join(map(str, _ROWS))}, got {config.rows}"
    if config and config.rows > 1 and (config.threads, config.cluster) != (_WARP, 1):
        return f"several rows in a block have {_WARP} threads each and no cluster, got {config}"
    return cuda_rows.shared_refusal(logits, config)


def default(logits: TensorSpec, targets: TensorSpec) -> Config:
    m, n, _ = rows(logits)
    cluster = cuda_rows.spread(logits, busy=_PROCESSORS) if n > _ALONE else 1
    if cluster > 1:
        return Config(512, cluster)
    few = _WARP if n <= 16384 else 128  # 8192 × 8192 on an H200: 37.4 µs with a warp for a row, 40.9 with four
    most = min(_PROCESSORS * 1024 // max(m, 1), n // 8)  # of few rows: 8 values for each
    threads = max([t for t in THREADS if t <= min(most, 512)] + [few])
    return Config(threads, rows=4 if threads == _WARP and m > _PROCESSORS else 1)


def configs(logits: TensorSpec, targets: TensorSpec) -> list[Config]:
    several = [Config(_WARP, rows=count) for count in _ROWS[1:]]
    return [Config(c.threads, c.cluster) for c in cuda_rows.shared_configs(logits)] + several


@functools.cache  # few: one for each dtype, alignment and config
def _instance(dtype: torch.dtype, values: int, config: Config) -> cuda_glue.Kernel:
    name = f"cross_entropy<{cuda_glue.TYPES[dtype]}, {values}, {config.threads}, {config.cluster}, {config.rows}>"
    threads = config.threads * config.rows
    return cuda_glue.Kernel(_SOURCE, name, "PPPPqqqqffi", threads, cluster=config.cluster, early=True)


def _kernel(logits, n: int, stride: int, config: Config) -> cuda_glue.Kernel:
    return _instance(logits.dtype, cuda_glue.width((logits,), n, stride), config)


def compile(specs, config: Config, arch: str) -> Artifact:
    _, n, stride = rows(specs[0])
    return _kernel(specs[0], n, stride, config).compile(arch)


def run(outs, args, config: Config) -> None:
    logits, targets, label_smoothing, ignore_index, z_loss = args
    m, n, stride = rows(logits)
    pointers = [t.data_ptr() for t in (logits, targets, *outs)]
    scalars = m, n, ignore_index, label_smoothing, z_loss, m <= FEW
    blocks = -(-m // config.rows) * config.cluster
    _kernel(logits, n, stride, config).launch(blocks, *pointers, stride, *scalars)
