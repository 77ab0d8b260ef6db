"""rms_norm, add_rms_norm and layer_norm in Triton, and the first two to fp8.

A program takes one row, or a few short ones, in registers: inputs are read once. A row that registers do not hold is
read again (layer_norm: three times in all).
"""

from typing import Any

import triton
import triton.language as tl

from tilery.base.launch import Launch
from tilery.core.call import Call
from tilery.core.kernel import Kernel
from tilery.hardware.gpu import ARCHS
from tilery.languages.triton_glue import pdl_wait
from tilery.ops.norms.triton import tiles
from tilery.ops.norms.triton.normalise import Fp8, normalise, own_rows
from tilery.ops.norms.triton.tiles import LONG_ROW, LONG_SUM, Config, Tiling
from tilery.ops.quantize import formats, triton_fp8
from tilery.ops.rows.shape import rows, two_level_rows


@triton.jit(do_not_specialize=["m"])
def _rms_norm(
    x_ptr, w_ptr, y_ptr, x_stride, heads, step, m, n, eps, offset,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    pdl_wait()
    row, inside = own_rows(m, ROWS)
    x_row = x_ptr + (row // heads) * x_stride + (row % heads) * step
    y_row = y_ptr + row * n
    normalise(x_row, None, w_ptr, None, y_row, None, None, 0, inside, n, eps, offset, ROWS, BLOCK, READ)


@triton.jit(do_not_specialize=["m"])
def _add_rms_norm(
    x_ptr, r_ptr, w_ptr, y_ptr, sum_ptr, x_stride, r_stride, m, n, eps, offset,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    pdl_wait()
    row, inside = own_rows(m, ROWS)
    x_row, r_row, y_row, sum_row = x_ptr + row * x_stride, r_ptr + row * r_stride, y_ptr + row * n, sum_ptr + row * n
    normalise(x_row, r_row, w_ptr, None, y_row, sum_row, None, 0, inside, n, eps, offset, ROWS, BLOCK, READ)


@triton.jit(do_not_specialize=["m"])
def _layer_norm(
    x_ptr, w_ptr, b_ptr, y_ptr, x_stride, m, n, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    pdl_wait()
    row, inside = own_rows(m, ROWS)
    x_row, y_row = x_ptr + row * x_stride, y_ptr + row * n
    normalise(x_row, None, w_ptr, b_ptr, y_row, None, None, 0, inside, n, eps, 0.0, ROWS, BLOCK, READ, CENTRED=True)


@triton.jit(do_not_specialize=["m"])
def _rms_norm_fp8(
    x_ptr, w_ptr, y_ptr, s_ptr, x_stride, s_stride, s_step, m, n, eps, offset,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, READ: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    pdl_wait()
    row, inside = own_rows(m, ROWS)
    x_row, y_row, s_row = x_ptr + row * x_stride, y_ptr + row * n, s_ptr + row * s_stride
    normalise(
        x_row, None, w_ptr, None, y_row, None, s_row, s_step, inside, n, eps, offset, ROWS, BLOCK, READ, False, FP8
    )


@triton.jit(do_not_specialize=["m"])
def _add_rms_norm_fp8(
    x_ptr, r_ptr, w_ptr, y_ptr, s_ptr, sum_ptr, x_stride, r_stride, s_stride, s_step, m, n, eps, offset,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, READ: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    pdl_wait()
    row, inside = own_rows(m, ROWS)
    x_row, r_row, sum_row = x_ptr + row * x_stride, r_ptr + row * r_stride, sum_ptr + row * n
    y_row, s_row = y_ptr + row * n, s_ptr + row * s_stride
    normalise(
        x_row, r_row, w_ptr, None, y_row, sum_row, s_row, s_step, inside, n, eps, offset, ROWS, BLOCK, READ, False, FP8
    )


class Norm(Kernel):
    """A kernel whose programs take rows of x."""

    archs = ARCHS
    Config = Config
    kernel: Any

    def tiling(self, call: Call) -> Tiling:
        raise NotImplementedError

    def args(self, call: Call) -> dict[str, Any]:
        """The arguments of the kernel but m, n and eps, by name."""
        raise NotImplementedError

    def constants(self, call: Call) -> dict[str, Any]:
        """What the kernel is compiled for besides how its rows are cut."""
        return {}

    def refusal(self, call: Call, config: Config | None = None) -> str | None:
        return tiles.refusal(config, self.tiling(call).least_block)

    def default(self, call: Call) -> Config:
        return self.tiling(call).default(call.x)

    def configs(self, call: Call) -> list[Config]:
        return self.tiling(call).configs(call.x)

    def launches(self, call: Call, config: Config) -> list[Launch]:
        m, n, _ = rows(call.x)
        args = {**self.args(call), "m": m, "n": n, "eps": call.eps}
        constants = {**self.tiling(call).constants(call.x, config), **self.constants(call)}
        grid, options = triton.cdiv(m, config.rows), {"num_warps": config.num_warps}
        return [Launch(self.kernel, grid, args, constants, options, pdl=True)]


class RmsNorm(Norm):
    kernel = _rms_norm

    def tiling(self, call: Call) -> Tiling:
        return Tiling(one_sum=True)

    def args(self, call: Call) -> dict[str, Any]:
        _, _, stride, heads, step = two_level_rows(call.x)
        tensors = {"x_ptr": call.x, "w_ptr": call.weight, "y_ptr": call.y}
        return tensors | {"x_stride": stride, "heads": heads, "step": step, "offset": call.offset}


class AddRmsNorm(Norm):
    kernel = _add_rms_norm

    def tiling(self, call: Call) -> Tiling:
        return Tiling(inputs=2, one_sum=True, long=LONG_SUM, wide=8192)

    def args(self, call: Call) -> dict[str, Any]:
        tensors = {"x_ptr": call.x, "r_ptr": call.residual, "w_ptr": call.weight}
        tensors |= {"y_ptr": call.y, "sum_ptr": call.residual_out}
        strides = {"x_stride": rows(call.x).stride, "r_stride": rows(call.residual).stride}
        return tensors | strides | {"offset": call.offset}


class LayerNorm(Norm):
    kernel = _layer_norm

    def tiling(self, call: Call) -> Tiling:
        return Tiling()

    def args(self, call: Call) -> dict[str, Any]:
        tensors = {"x_ptr": call.x, "w_ptr": call.weight, "b_ptr": call.bias, "y_ptr": call.y}
        return tensors | {"x_stride": rows(call.x).stride}


class RmsNormFp8(Norm):
    kernel = _rms_norm_fp8
    inputs = 1

    def tiling(self, call: Call) -> Tiling:
        least_block = formats.GROUP if call.per == "group" else 1  # whole groups
        return Tiling(self.inputs, least_block=least_block, long=LONG_ROW if call.per == "token" else LONG_SUM)

    def args(self, call: Call) -> dict[str, Any]:
        s_stride, s_step = call.scales.strides
        y = triton_fp8.as_bytes(call.values)
        tensors = {"x_ptr": call.x, "w_ptr": call.weight, "y_ptr": y, "s_ptr": call.scales}
        strides = {"x_stride": rows(call.x).stride, "s_stride": s_stride, "s_step": s_step}
        return tensors | strides | {"offset": call.offset}

    def constants(self, call: Call) -> dict[str, Any]:
        return {"FP8": Fp8(call.per, call.format, call.pow2, triton_fp8.native(call.x.device))}


class AddRmsNormFp8(RmsNormFp8):
    kernel = _add_rms_norm_fp8
    inputs = 2

    def args(self, call: Call) -> dict[str, Any]:
        residual = {"r_ptr": call.residual, "sum_ptr": call.residual_out, "r_stride": rows(call.residual).stride}
        return super().args(call) | residual


rms_norm, add_rms_norm, layer_norm = RmsNorm(), AddRmsNorm(), LayerNorm()
rms_norm_fp8, add_rms_norm_fp8 = RmsNormFp8(), AddRmsNormFp8()
