"""The sum waits in the registers of a block or a cluster for its mean, so x and residual are read once."""

import math
from pathlib import Path

from tilery.base.spec import Artifact, TensorSpec
from tilery.parts import cuda_rows
from tilery.parts.cuda_rows import Config
from tilery.parts.rows import rows

archs = cuda_rows.archs

_SOURCE = Path(__file__).with_name("add_rms_norm.cu")


def refusal(x: TensorSpec, residual: TensorSpec, weight: TensorSpec, config: Config | None = None) -> str | None:
    return cuda_rows.refusal(config, x, residual, weight=weight)


def default(x: TensorSpec, residual: TensorSpec, weight: TensorSpec) -> Config:
    return cuda_rows.default(x, residual, weight=weight)


def configs(x: TensorSpec, residual: TensorSpec, weight: TensorSpec) -> list[Config]:
    return cuda_rows.configs(x, residual, weight=weight)


def _kernel(x, residual, weight, n: int, stride: int, r_stride: int, config: Config) -> cuda_rows.Launch:
    both = math.gcd(stride, r_stride)  # a multiple of 16 bytes where both are
    return cuda_rows.Launch(_SOURCE, "PPPPPqqqqff", (x, residual, weight), n, both, config, 2)


def compile(specs, config: Config, arch: str) -> Artifact:
    _, n, stride = rows(specs[0])
    return _kernel(*specs, n, stride, rows(specs[1]).stride, config).kernel.compile(arch)


def run(outs, args, config: Config) -> None:
    x, residual, weight, eps, offset = args
    (m, n, stride), r_stride = rows(x), rows(residual).stride
    kernel = _kernel(x, residual, weight, n, stride, r_stride, config)
    pointers = [t.data_ptr() for t in (x, residual, weight, *outs)]
    kernel.run(m, *pointers, stride, r_stride, m, n, eps, offset)
