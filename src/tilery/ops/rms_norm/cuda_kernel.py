"""A row waits in the registers of a block or a cluster for its mean, so x is read once, 16 bytes at a time."""

from pathlib import Path

from tilery.base.spec import Artifact, TensorSpec
from tilery.parts import cuda_rows
from tilery.parts.cuda_rows import Config
from tilery.parts.rows import heads_refusal, rows

archs = cuda_rows.archs

_SOURCE = Path(__file__).with_name("rms_norm.cu")


def refusal(x: TensorSpec, weight: TensorSpec, config: Config | None = None) -> str | None:
    return heads_refusal(x) or cuda_rows.refusal(config, x, weight=weight)


def default(x: TensorSpec, weight: TensorSpec) -> Config:
    return cuda_rows.default(x, weight=weight)


def configs(x: TensorSpec, weight: TensorSpec) -> list[Config]:
    return cuda_rows.configs(x, weight=weight)


def _kernel(x, weight, n: int, stride: int, config: Config) -> cuda_rows.Launch:
    return cuda_rows.Launch(_SOURCE, "PPPqqqff", (x, weight), n, stride, config, 1)


def compile(specs, config: Config, arch: str) -> Artifact:
    _, n, stride = rows(specs[0])
    return _kernel(*specs, n, stride, config).kernel.compile(arch)


def run(outs, args, config: Config) -> None:
    x, weight, eps, offset = args
    m, n, stride = rows(x)
    kernel = _kernel(x, weight, n, stride, config)
    kernel.run(m, x.data_ptr(), weight.data_ptr(), outs[0].data_ptr(), stride, m, n, eps, offset)
