"""One block per row, 16 bytes per access; the row waits in registers for its maximum and its sum, so x is read once."""

from dataclasses import dataclass
from pathlib import Path

from tilery.backends import cuda_glue
from tilery.op import Artifact, TensorSpec
from tilery.ops.rows import rows

archs = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")

_SOURCE = Path(__file__).with_name("softmax.cu")


@dataclass(frozen=True)
class Config:
    threads: int  # in a block


def refusal(x: TensorSpec, config: Config | None = None) -> str | None:
    return cuda_glue.row_refusal(config.threads) if config else None


def default(x: TensorSpec) -> Config:
    return Config(cuda_glue.default_row_threads(x.shape[-1]))


def configs(x: TensorSpec) -> list[Config]:
    return [Config(threads) for threads in cuda_glue.row_threads(x.shape[-1], _width(x))]


def _width(x) -> int:
    _, n, stride = rows(x)
    return cuda_glue.width((x,), n, stride)


def _kernel(x, config: Config) -> cuda_glue.Kernel:
    """The instance for these rows; of a tensor for `run` and of a spec for `compile`."""
    return cuda_glue.row_kernel(_SOURCE, "PPqq", x.dtype, x.shape[-1], _width(x), config.threads)


def compile(specs, config: Config, arch: str) -> Artifact:
    return _kernel(*specs, config).compile(arch)


def run(outs, args, config: Config) -> None:
    (x,) = args
    m, n, stride = rows(x)
    _kernel(x, config).launch(m, x.data_ptr(), outs[0].data_ptr(), stride, n)
