"""CUDA kernels that normalise rows to fp8: for few long rows, each in the registers of a block or a cluster."""

import functools
from pathlib import Path
from typing import Any

import torch

from tilery.base.spec import TensorSpec
from tilery.languages import cuda_glue
from tilery.parts import cuda_rows
from tilery.parts.cuda_rows import Shared as Config
from tilery.parts.rows import rows

archs = cuda_rows.archs

_SOURCE = Path(__file__).parents[1] / "ops" / "rms_norm_fp8" / "rms_norm_fp8.cu"


def refusal(
    x: TensorSpec, residual: TensorSpec | None, weight: TensorSpec, per: str, config: Config | None
) -> str | None:
    if per == "group" and _width(x, residual, weight) == 1:
        return "rows must start and end at multiples of 16 bytes where groups of them have scales"
    if not _fits(x, taken := config or default(x)):
        return f"row of {x.shape[-1]} does not fit the registers of {taken.cluster} × {taken.threads} threads"
    return cuda_rows.shared_refusal(x, config)


def default(x: TensorSpec) -> Config:
    """Few rows are spread out; a row too long for that is spread until it fits."""
    found = [
        Config(cuda_rows.threads_for(x.shape[-1], c), c) for c in cuda_rows.clusters(x) if c >= cuda_rows.spread(x)
    ]
    return next((c for c in found if _fits(x, c)), found[-1])


def configs(x: TensorSpec) -> list[Config]:
    return [c for c in cuda_rows.shared_configs(x) if _fits(x, c)]


def _fits(x: TensorSpec, config: Config) -> bool:
    return cuda_rows.fits(x, config, more=2)  # with the residual, and the weights before the sums are known


def _width(x: Any, residual: Any, weight: Any) -> int:
    """Values per access; of tensors or specs."""
    _, n, stride = rows(x)
    if residual is None:
        return cuda_glue.width((x, weight), n, stride)
    return cuda_glue.width((x, residual, weight), n, stride, rows(residual).stride)


@functools.cache  # few: rows of many lengths share an instance
def _kernel(
    dtype: torch.dtype, adds: bool, grouped: bool, e5m2: bool, values: int, steps: int, config: Config
) -> cuda_glue.Kernel:
    flags = ", ".join(str(flag).lower() for flag in (adds, grouped, e5m2))
    sizes = f"{values}, {steps}, {config.threads}, {config.cluster}"
    name = f"rms_norm_fp8<{cuda_glue.TYPES[dtype]}, {flags}, {sizes}>"
    return cuda_glue.Kernel(_SOURCE, name, "PPPPPPqqqqqffi", config.threads, cluster=config.cluster, early=True)


def kernel(x: Any, residual: Any, weight: Any, per: str, format: str, config: Config) -> cuda_glue.Kernel:
    """Of tensors for a launch and of specs for a compile."""
    values = _width(x, residual, weight)
    steps = max(-(-x.shape[-1] // (values * config.threads * config.cluster)), 1)
    return _kernel(x.dtype, residual is not None, per == "group", format == "e5m2", values, steps, config)


def run(
    outs: Any, x: Any, residual: Any, weight: Any, eps: float, offset: float, per: str, pow2: bool, format: str,
    config: Config,
) -> None:  # fmt: skip
    """outs: values, scales, and the sum where there is a residual."""
    m, n, stride = rows(x)
    values, scales, *total = outs
    r_at, r_stride = (0, 0) if residual is None else (residual.data_ptr(), rows(residual).stride)
    pointers = x.data_ptr(), r_at, weight.data_ptr(), values.data_ptr(), scales.data_ptr()
    strides = stride, r_stride, scales.stride(0), scales.stride(1)
    kernel(x, residual, weight, per, format, config).launch(
        m * config.cluster, *pointers, total[0].data_ptr() if total else 0, *strides, n, eps, offset, pow2
    )
