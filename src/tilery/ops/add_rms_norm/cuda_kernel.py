"""One block per row, 16 bytes per access; the sum waits in registers for its mean, so x and residual are read once."""

import math
from pathlib import Path

from tilery.backends import cuda_glue
from tilery.parts import block_rows, cuda_rows
from tilery.parts.block_rows import Config
from tilery.parts.rows import rows
from tilery.spec import Artifact, TensorSpec

archs = block_rows.archs

_SOURCE = Path(__file__).with_name("add_rms_norm.cu")


def refusal(x: TensorSpec, residual: TensorSpec, weight: TensorSpec, config: Config | None = None) -> str | None:
    return block_rows.refusal(config)


def default(x: TensorSpec, residual: TensorSpec, weight: TensorSpec) -> Config:
    return cuda_rows.default(x.shape[-1])


def configs(x: TensorSpec, residual: TensorSpec, weight: TensorSpec) -> list[Config]:
    _, n, stride = rows(x)
    return cuda_rows.configs((x, residual, weight), n, math.gcd(stride, rows(residual).stride))


def _kernel(x, residual, weight, n: int, stride: int, r_stride: int, config: Config) -> cuda_glue.Kernel:
    both = math.gcd(stride, r_stride)  # a multiple of 16 bytes where both are
    return cuda_rows.kernel(_SOURCE, "PPPPPqqqff", (x, residual, weight), n, both, config.threads)


def compile(specs, config: Config, arch: str) -> Artifact:
    _, n, stride = rows(specs[0])
    return _kernel(*specs, n, stride, rows(specs[1]).stride, config).compile(arch)


def run(outs, args, config: Config) -> None:
    x, residual, weight, eps, offset = args
    (m, n, stride), r_stride = rows(x), rows(residual).stride
    kernel = _kernel(x, residual, weight, n, stride, r_stride, config)
    pointers = [t.data_ptr() for t in (x, residual, weight, *outs)]
    kernel.launch(m, *pointers, stride, r_stride, n, eps, offset)
