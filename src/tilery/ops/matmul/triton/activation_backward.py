"""activation_backward in Triton: a program takes a block of one row."""

import triton
import triton.language as tl

from tilery.base.launch import Launch
from tilery.base.rows import flat_rows
from tilery.core.call import Call
from tilery.languages.triton_glue import pdl_launch_dependents, pdl_wait
from tilery.ops.gated.triton_activations import factor_and_slope
from tilery.ops.rows import triton_rows
from tilery.ops.rows.triton_rows import Config, TritonRows, grid_of, own_columns


@triton.jit
def _gradient(dy, z, ACT: tl.constexpr):
    """dy · act'(z)."""
    if ACT == "relu":
        return tl.where(z <= 0, 0.0, dy)  # no product: 0 · inf would be NaN
    if ACT == "silu":
        _, slope = factor_and_slope(z, "silu")
    elif ACT == "gelu":
        _, slope = factor_and_slope(z, "none")
    else:
        _, slope = factor_and_slope(z, "tanh")
    return dy * slope


@triton.jit
def _activation_backward(
    dy_ptr, z_ptr, dz_ptr, dy_stride, z_stride, n, ACT: tl.constexpr, BLOCK: tl.constexpr, GRID: tl.constexpr
):
    pdl_wait()
    pdl_launch_dependents()
    row, start, cols, mask = own_columns(n, BLOCK, GRID)
    dy = tl.load(dy_ptr + row * dy_stride + start + cols, mask=mask).to(tl.float32)
    z = tl.load(z_ptr + row * z_stride + start + cols, mask=mask).to(tl.float32)
    tl.store(dz_ptr + row * n + start + cols, _gradient(dy, z, ACT), mask=mask)


class ActivationBackward(TritonRows):
    def default(self, call: Call) -> Config:
        _, n, *_ = flat_rows(call.dy, call.z)
        return triton_rows.default(n)

    def launches(self, call: Call, config: Config) -> list[Launch]:
        m, n, dy_stride, z_stride = flat_rows(call.dy, call.z)
        args = {"dy_ptr": call.dy, "z_ptr": call.z, "dz_ptr": call.dz}
        args |= {"dy_stride": dy_stride, "z_stride": z_stride, "n": n}
        grid, constants = grid_of(m, n, config)
        constants |= {"ACT": call.activation}
        return [Launch(_activation_backward, grid, args, constants, config.options, pdl=True)]


activation_backward = ActivationBackward()
