"""A row waits in the registers of a block or a cluster for its maximum and its sum, so that x is read once."""

from pathlib import Path

from tilery.base.spec import Artifact, TensorSpec
from tilery.parts import cuda_rows
from tilery.parts.cuda_rows import Config
from tilery.parts.rows import rows

archs = cuda_rows.archs

_SOURCE = Path(__file__).with_name("softmax.cu")


def refusal(x: TensorSpec, config: Config | None = None) -> str | None:
    return cuda_rows.refusal(config, x)


def default(x: TensorSpec) -> Config:
    return cuda_rows.default(x)


def configs(x: TensorSpec) -> list[Config]:
    return cuda_rows.configs(x)


def _kernel(x, n: int, stride: int, config: Config) -> cuda_rows.Launch:
    return cuda_rows.Launch(_SOURCE, "PPqqq", (x,), n, stride, config, 1)


def compile(specs, config: Config, arch: str) -> Artifact:
    _, n, stride = rows(specs[0])
    return _kernel(*specs, n, stride, config).kernel.compile(arch)


def run(outs, args, config: Config) -> None:
    (x,) = args
    m, n, stride = rows(x)
    _kernel(x, n, stride, config).run(m, x.data_ptr(), outs[0].data_ptr(), stride, m, n)
