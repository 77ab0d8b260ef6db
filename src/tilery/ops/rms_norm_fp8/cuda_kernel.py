"""Few long rows: each waits in the registers of a block or a cluster, so x is read once."""

from tilery.base.spec import Artifact, TensorSpec
from tilery.parts import cuda_norms_fp8
from tilery.parts.cuda_norms_fp8 import Config

archs = cuda_norms_fp8.archs


def refusal(x: TensorSpec, weight: TensorSpec, per, layout, pow2, format, config: Config | None = None) -> str | None:
    return cuda_norms_fp8.refusal(x, None, weight, per, config)


def default(x: TensorSpec, weight: TensorSpec, per, layout, pow2, format) -> Config:
    return cuda_norms_fp8.default(x)


def configs(x: TensorSpec, weight: TensorSpec, per, layout, pow2, format) -> list[Config]:
    return cuda_norms_fp8.configs(x)


def compile(specs, config: Config, arch: str) -> Artifact:
    x, weight, per, _, _, format = specs
    return cuda_norms_fp8.kernel(x, None, weight, per, format, config).compile(arch)


def run(outs, args, config: Config) -> None:
    x, weight, eps, offset, per, _, pow2, format = args
    cuda_norms_fp8.run(outs, x, None, weight, eps, offset, per, pow2, format, config)
