"""One block per row, 16 bytes per access; the row waits in registers for its maximum and its sum, so x is read once."""

from pathlib import Path

from tilery.backends import cuda_glue
from tilery.parts import block_rows, cuda_rows
from tilery.parts.block_rows import Config
from tilery.parts.rows import rows
from tilery.spec import Artifact, TensorSpec

archs = block_rows.archs

_SOURCE = Path(__file__).with_name("softmax.cu")


def refusal(x: TensorSpec, config: Config | None = None) -> str | None:
    return block_rows.refusal(config)


def default(x: TensorSpec) -> Config:
    return cuda_rows.default(x.shape[-1])


def configs(x: TensorSpec) -> list[Config]:
    _, n, stride = rows(x)
    return cuda_rows.configs((x,), n, stride)


def _kernel(x, n: int, stride: int, config: Config) -> cuda_glue.Kernel:
    return cuda_rows.kernel(_SOURCE, "PPqq", (x,), n, stride, config.threads)


def compile(specs, config: Config, arch: str) -> Artifact:
    _, n, stride = rows(specs[0])
    return _kernel(*specs, n, stride, config).compile(arch)


def run(outs, args, config: Config) -> None:
    (x,) = args
    m, n, stride = rows(x)
    _kernel(x, n, stride, config).launch(m, x.data_ptr(), outs[0].data_ptr(), stride, n)
