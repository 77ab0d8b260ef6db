"""Gated activations, relu_squared and their backwards in Triton: a program takes a block of one row."""

import triton
import triton.language as tl

from tilery.base.launch import Launch
from tilery.base.rows import flat_rows, rows
from tilery.core.call import Call
from tilery.languages.triton_glue import multiple, pdl_launch_dependents, pdl_wait, vector_of
from tilery.ops.gated.call import GatedCall
from tilery.ops.gated.triton_activations import activated, factor_and_slope
from tilery.ops.rows import triton_rows
from tilery.ops.rows.triton_rows import Config, TritonRows, grid_of, own_columns

# silu_mul, gelu_mul


@triton.jit
def _gated(
    g_ptr, u_ptr, y_ptr, g_stride, u_stride, u_start, n,
    ACT: tl.constexpr, BLOCK: tl.constexpr, GRID: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    pdl_wait()
    pdl_launch_dependents()
    n, u_start = multiple(n, VECTOR), multiple(u_start, VECTOR)
    g_stride, u_stride = multiple(g_stride, VECTOR), multiple(u_stride, VECTOR)
    row, start, cols, mask = own_columns(n, BLOCK, GRID)
    g = tl.load(g_ptr + row * g_stride + start + cols, mask=mask).to(tl.float32)
    u = tl.load(u_ptr + row * u_stride + u_start + start + cols, mask=mask).to(tl.float32)
    tl.store(y_ptr + row * n + start + cols, activated(g, ACT) * u, mask=mask)


@triton.jit
def _gated_backward(
    dy_ptr, g_ptr, u_ptr, dg_ptr, du_ptr,
    dy_stride, g_stride, u_stride, u_start, d_stride, du_start, n,
    ACT: tl.constexpr, BLOCK: tl.constexpr, GRID: tl.constexpr,
):  # fmt: skip
    pdl_wait()
    pdl_launch_dependents()
    row, start, cols, mask = own_columns(n, BLOCK, GRID)
    dy = tl.load(dy_ptr + row * dy_stride + start + cols, mask=mask).to(tl.float32)
    g = tl.load(g_ptr + row * g_stride + start + cols, mask=mask).to(tl.float32)
    u = tl.load(u_ptr + row * u_stride + u_start + start + cols, mask=mask).to(tl.float32)
    factor, slope = factor_and_slope(g, ACT)
    tl.store(dg_ptr + row * d_stride + start + cols, dy * u * slope, mask=mask)
    tl.store(du_ptr + row * d_stride + du_start + start + cols, dy * g * factor, mask=mask)


class Gated(TritonRows):
    def default(self, call: GatedCall) -> Config:
        return triton_rows.default(call.gate.shape[-1])

    def launches(self, call: GatedCall, config: Config) -> list[Launch]:
        gate, up = call.sources
        m, n, gate_stride, up_stride = call.flat_rows
        args = {"g_ptr": gate, "u_ptr": up, "y_ptr": call.y}
        args |= {"g_stride": gate_stride, "u_stride": up_stride, "u_start": call.up_start, "n": n}
        grid, constants = grid_of(m, n, config)
        constants |= {"ACT": call.act, "VECTOR": vector_of(gate, n, gate_stride, up_stride, call.up_start)}
        return [Launch(_gated, grid, args, constants, config.options, pdl=True)]


class GatedBackward(TritonRows):
    def default(self, call: GatedCall) -> Config:
        return triton_rows.default(call.dy.shape[-1])

    def launches(self, call: GatedCall, config: Config) -> list[Launch]:
        gate, up = call.sources
        if call.packed is None:
            m, n, dy_stride, gate_stride, up_stride = flat_rows(call.dy, gate, up)
            dgate, dup, d_stride, dup_start = call.dgate, call.dup, n if m > 1 else 0, 0
        else:
            (m, n, dy_stride), gate_stride = rows(call.dy), call.rows.stride
            up_stride = gate_stride
            dgate, dup, d_stride, dup_start = call.dx, call.dx, 2 * n, n
        args = {
            "dy_ptr": call.dy, "g_ptr": gate, "u_ptr": up, "dg_ptr": dgate, "du_ptr": dup,
            "dy_stride": dy_stride, "g_stride": gate_stride, "u_stride": up_stride, "u_start": call.up_start,
            "d_stride": d_stride, "du_start": dup_start, "n": n,
        }  # fmt: skip
        grid, constants = grid_of(m, n, config)
        return [Launch(_gated_backward, grid, args, constants | {"ACT": call.act}, config.options, pdl=True)]


gated, gated_backward = Gated(), GatedBackward()

# relu_squared


@triton.jit
def _relu_squared(x_ptr, y_ptr, x_stride, n, BLOCK: tl.constexpr, GRID: tl.constexpr):
    pdl_wait()
    row, start, cols, mask = own_columns(n, BLOCK, GRID)
    x = tl.load(x_ptr + row * x_stride + start + cols, mask=mask).to(tl.float32)
    positive = tl.where(x < 0, 0.0, x)  # tl.maximum would drop NaN
    tl.store(y_ptr + row * n + start + cols, positive * positive, mask=mask)


@triton.jit
def _relu_squared_backward(dy_ptr, x_ptr, dx_ptr, dy_stride, x_stride, n, BLOCK: tl.constexpr, GRID: tl.constexpr):
    pdl_wait()
    row, start, cols, mask = own_columns(n, BLOCK, GRID)
    dy = tl.load(dy_ptr + row * dy_stride + start + cols, mask=mask).to(tl.float32)
    x = tl.load(x_ptr + row * x_stride + start + cols, mask=mask).to(tl.float32)
    tl.store(dx_ptr + row * n + start + cols, 2 * dy * tl.where(x < 0, 0.0, x), mask=mask)  # NaN stays


class ReluSquared(TritonRows):
    def default(self, call: Call) -> Config:
        _, n, _ = flat_rows(call.x)
        return triton_rows.default(n, block=2048)

    def launches(self, call: Call, config: Config) -> list[Launch]:
        m, n, stride = flat_rows(call.x)
        args = {"x_ptr": call.x, "y_ptr": call.y, "x_stride": stride, "n": n}
        grid, constants = grid_of(m, n, config)
        return [Launch(_relu_squared, grid, args, constants, config.options, pdl=True)]


class ReluSquaredBackward(TritonRows):
    def default(self, call: Call) -> Config:
        _, n, *_ = flat_rows(call.dy, call.x)
        return triton_rows.default(n)

    def launches(self, call: Call, config: Config) -> list[Launch]:
        m, n, dy_stride, x_stride = flat_rows(call.dy, call.x)
        args = {"dy_ptr": call.dy, "x_ptr": call.x, "dx_ptr": call.dx}
        args |= {"dy_stride": dy_stride, "x_stride": x_stride, "n": n}
        grid, constants = grid_of(m, n, config)
        return [Launch(_relu_squared_backward, grid, args, constants, config.options, pdl=True)]


relu_squared, relu_squared_backward = ReluSquared(), ReluSquaredBackward()
