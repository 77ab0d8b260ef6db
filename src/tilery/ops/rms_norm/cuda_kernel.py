"""One block per row, 16 bytes per access; the row waits in registers for its mean, so x is read once."""

from pathlib import Path

from tilery.backends import cuda_glue
from tilery.parts import block_rows, cuda_rows
from tilery.parts.block_rows import Config
from tilery.parts.rows import heads_refusal, rows
from tilery.spec import Artifact, TensorSpec

archs = block_rows.archs

_SOURCE = Path(__file__).with_name("rms_norm.cu")


def refusal(x: TensorSpec, weight: TensorSpec, config: Config | None = None) -> str | None:
    return heads_refusal(x) or block_rows.refusal(config)


def default(x: TensorSpec, weight: TensorSpec) -> Config:
    return cuda_rows.default(x.shape[-1])


def configs(x: TensorSpec, weight: TensorSpec) -> list[Config]:
    _, n, stride = rows(x)
    return cuda_rows.configs((x, weight), n, stride)


def _kernel(x, weight, n: int, stride: int, config: Config) -> cuda_glue.Kernel:
    return cuda_rows.kernel(_SOURCE, "PPPqqff", (x, weight), n, stride, config.threads)


def compile(specs, config: Config, arch: str) -> Artifact:
    _, n, stride = rows(specs[0])
    return _kernel(*specs, n, stride, config).compile(arch)


def run(outs, args, config: Config) -> None:
    x, weight, eps, offset = args
    m, n, stride = rows(x)
    kernel = _kernel(x, weight, n, stride, config)
    kernel.launch(m, x.data_ptr(), weight.data_ptr(), outs[0].data_ptr(), stride, n, eps, offset)
