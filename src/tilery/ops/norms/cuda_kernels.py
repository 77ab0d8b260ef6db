"""rms_norm and add_rms_norm in CUDA C++, and both to fp8.

A row stays in the registers of a block or a cluster until its sums are known, so that inputs are read once.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilery.base.launch import Launch
from tilery.base.rows import rows, two_level_refusal
from tilery.base.spec import TensorSpec
from tilery.core.call import Call
from tilery.core.kernel import Kernel
from tilery.hardware.gpu import ARCHS
from tilery.languages.cuda_source import Source, vector_width
from tilery.ops.rows import cuda_rows
from tilery.ops.rows.cuda_rows import Clusters, CudaRows


class RmsNorm(CudaRows):
    source = Path(__file__).with_name("rms_norm.cu")

    def inputs(self, call: Call) -> tuple[TensorSpec, ...]:
        return (call.x,)

    def weight(self, call: Call) -> TensorSpec:
        weight: TensorSpec = call.weight
        return weight

    def args(self, call: Call) -> dict[str, Any]:
        m, n, stride = rows(call.x)
        args = {"x": call.x, "weight": call.weight, "y": call.y, "x_stride": stride, "m": m, "n": n}
        return args | {"eps": call.eps, "offset": call.offset}

    def refusal(self, call: Call, config: cuda_rows.Config | None = None) -> str | None:
        return two_level_refusal(call.x) or super().refusal(call, config)


class AddRmsNorm(CudaRows):
    source = Path(__file__).with_name("add_rms_norm.cu")

    def inputs(self, call: Call) -> tuple[TensorSpec, ...]:
        return call.x, call.residual

    def weight(self, call: Call) -> TensorSpec:
        weight: TensorSpec = call.weight
        return weight

    def args(self, call: Call) -> dict[str, Any]:
        m, n, stride = rows(call.x)
        args = {"x": call.x, "residual": call.residual, "weight": call.weight, "y": call.y, "total": call.residual_out}
        args |= {"x_stride": stride, "residual_stride": rows(call.residual).stride, "m": m, "n": n}
        return args | {"eps": call.eps, "offset": call.offset}


@dataclass(frozen=True)
class RmsNormFp8(Kernel):
    """For few long rows. `adds`: a residual is added to x first."""

    adds: bool

    archs = ARCHS
    Config = Clusters
    source = Path(__file__).with_name("rms_norm_fp8.cu")

    def refusal(self, call: Call, config: Clusters | None = None) -> str | None:
        if call.per == "group" and self._vector(call) == 1:
            return "rows must start and end at multiples of 16 bytes where groups of them have scales"
        if not _fits(call.x, taken := config or self.default(call)):
            n = call.x.shape[-1]
            return f"row of {n} does not fit the registers of {taken.cluster} × {taken.threads} threads"
        return cuda_rows.cluster_refusal(call.x, config)

    def default(self, call: Call) -> Clusters:
        """Few rows are spread out; a row too long for that is spread until it fits."""
        x, least = call.x, cuda_rows.spread(call.x)
        sizes = [c for c in cuda_rows.clusters(x) if c >= least]
        found = [Clusters(cuda_rows.threads_for(x.shape[-1], c), c) for c in sizes]
        return next((c for c in found if _fits(x, c)), found[-1])

    def configs(self, call: Call) -> list[Clusters]:
        return [c for c in cuda_rows.cluster_configs(call.x) if _fits(call.x, c)]

    def launches(self, call: Call, config: Clusters) -> list[Launch]:
        m, n, stride = rows(call.x)
        vector = self._vector(call)
        steps = max(-(-n // (vector * config.threads * config.cluster)), 1)
        constants = {"T": call.x.dtype, "ADD": self.adds, "GROUPED": call.per == "group"}
        constants |= {"E5M2": call.format == "e5m2", "VEC": vector, "VECS_PER_THREAD": steps}
        constants |= {"THREADS": config.threads, "CLUSTER": config.cluster}
        s_stride, s_step = call.scales.strides
        args = {"x": call.x, "weight": call.weight, "y": call.values, "scales": call.scales}
        args |= {"x_stride": stride, "scales_row_stride": s_stride, "scales_group_stride": s_step, "n": n}
        args |= {"eps": call.eps, "offset": call.offset, "pow2": call.pow2}
        if self.adds:
            residual_stride = rows(call.residual).stride
            args |= {"residual": call.residual, "residual_stride": residual_stride, "total": call.residual_out}
        else:
            args |= {"residual": 0, "residual_stride": 0, "total": 0}  # not read, not written
        source, options = Source(self.source, "rms_norm_fp8"), {"threads": config.threads}
        return [Launch(source, m * config.cluster, args, constants, options, cluster=config.cluster, pdl=True)]

    def _vector(self, call: Call) -> int:
        """Values per access."""
        _, n, stride = rows(call.x)
        if not self.adds:
            return vector_width((call.x, call.weight), n, stride)
        return vector_width((call.x, call.residual, call.weight), n, stride, rows(call.residual).stride)


def _fits(x: TensorSpec, config: Clusters) -> bool:
    """A kernel to fp8 keeps the residual too, and the weights before the sums are known."""
    return cuda_rows.fits_registers(x, config, more=2)


rms_norm, add_rms_norm = RmsNorm(), AddRmsNorm()
rms_norm_fp8, add_rms_norm_fp8 = RmsNormFp8(adds=False), RmsNormFp8(adds=True)
