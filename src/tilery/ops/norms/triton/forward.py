"""rms_norm, add_rms_norm and layer_norm in Triton, and the first two to fp8.

A program takes one row, or a few short ones, in registers: inputs are read once. A row that registers do not hold is
read again (layer_norm: three times in all).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tilery.base.launch import Launch
from tilery.base.rows import rows, two_level_rows
from tilery.core.call import Call
from tilery.core.kernel import Kernel
from tilery.hardware.gpu import ARCHS
from tilery.languages.triton_glue import multiple, pdl_launch_dependents, pdl_wait, vector_of
from tilery.ops.norms.triton import tiles
from tilery.ops.norms.triton.tiles import LONG_ROW, LONG_SUM, Config, Tiling, inside_piece, load_pieces
from tilery.ops.quantize import formats, triton_fp8
from tilery.ops.quantize.triton_fp8 import magnitude

_GROUP = tl.constexpr(formats.GROUP)


class Fp8(NamedTuple):
    """How a kernel quantises: a constant of it."""

    per: str  # token or group
    format: str  # e4m3 or e5m2
    pow2: bool  # whether scales are powers of two
    native: bool  # whether the device rounds to fp8 itself


@triton.jit
def own_rows(m, ROWS: tl.constexpr):
    """[ROWS, 1]: this program's rows, and which of them exist."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # int64: row * stride overflows int32
    return row, row < m


@triton.jit
def _read(x_ptr, r_ptr, sum_ptr, cols, mask, POLICY: tl.constexpr):
    """x in fp32, or the rounded sum of x and a residual, which is written if it has a place."""
    x = tl.load(x_ptr + cols, mask=mask, other=0.0, eviction_policy=POLICY).to(tl.float32)
    if r_ptr is not None:
        r = tl.load(r_ptr + cols, mask=mask, other=0.0, eviction_policy=POLICY).to(tl.float32)
        total = (x + r).to(x_ptr.dtype.element_ty)
        if sum_ptr is not None:
            tl.store(sum_ptr + cols, total, mask=mask)
        x = total.to(tl.float32)
    return x


@triton.jit
def _columns(w_ptr, b_ptr, cols, n):
    """Weight and bias of columns; the weight again where there is no bias: Triton 3.6 keeps no None."""
    w = tl.load(w_ptr + cols, mask=cols < n, other=0.0)
    b = w
    if b_ptr is not None:
        b = tl.load(b_ptr + cols, mask=cols < n, other=0.0)
    return w, b


@triton.jit
def _weight_pieces(w_ptr, b_ptr, cols, n, PIECES: tl.constexpr):
    """What `_columns` has, for each piece."""
    every = tl.full((1, 1), True, tl.int1)
    w = load_pieces(w_ptr, cols, every, n, 0.0, PIECES)
    b = w
    if b_ptr is not None:
        b = load_pieces(b_ptr, cols, every, n, 0.0, PIECES)
    return w, b


@triton.jit
def _sum_pieces(x, r, sum_ptr, cols, inside, n, PIECES: tl.constexpr):
    """The rounded sums of x and a residual, which are written if they have a place."""
    sums = ()
    for i in tl.static_range(PIECES):
        total = (x[i].to(tl.float32) + r[i].to(tl.float32)).to(x[i].dtype)
        if sum_ptr is not None:
            mask = inside_piece(i, cols, inside, n, PIECES)
            tl.store(sum_ptr + i * cols.shape[-1] + cols, total, mask=mask)
        sums = sums + (total,)
    return sums


@triton.jit
def _centre_pieces(x, cols, inside, n, PIECES: tl.constexpr):
    """x less its mean, fp32; 0 outside rows."""
    total = x[0].to(tl.float32)
    for i in tl.static_range(1, PIECES):
        total += x[i].to(tl.float32)
    mean = tl.sum(total, axis=1, keep_dims=True) / n
    centred = ()
    for i in tl.static_range(PIECES):
        away = x[i].to(tl.float32) - mean
        centred = centred + (tl.where(inside_piece(i, cols, inside, n, PIECES), away, 0.0),)
    return centred


@triton.jit
def _weighted(x, w, b, b_ptr, offset):
    y = x * (w.to(tl.float32) + offset)
    if b_ptr is not None:
        y += b.to(tl.float32)
    return y


# Triton 3.6 passes a constant's field on only once it is a constant itself.


@triton.jit
def _scale(top, FP8: tl.constexpr):
    FORMAT: tl.constexpr = FP8.format
    POW2: tl.constexpr = FP8.pow2
    return triton_fp8.scale(top, FORMAT, POW2)


@triton.jit
def _quantize(y, FP8: tl.constexpr):
    FORMAT: tl.constexpr = FP8.format
    NATIVE: tl.constexpr = FP8.native
    return triton_fp8.quantize(y, FORMAT, NATIVE)


@triton.jit
def _greatest(y, mask):
    """[ROWS, 1]: the greatest of the magnitudes in each row."""
    return tl.max(tl.where(mask, magnitude(y), 0), axis=1, keep_dims=True)


@triton.jit
def _write_groups(y, y_ptr, s_ptr, s_step, first, n, inside, mask, FP8: tl.constexpr):
    """Quantises groups of 128; `s_ptr` [ROWS, 1] points to each row's first scale, `first` is the block's column."""
    ROWS: tl.constexpr = y.shape[0]
    GROUPS: tl.constexpr = y.shape[1] // _GROUP
    y = tl.reshape(tl.where(mask, y, 0.0), (ROWS, GROUPS, _GROUP))
    made = _scale(tl.max(magnitude(y), axis=2), FP8)
    group = first // _GROUP + tl.arange(0, GROUPS)[None, :]
    tl.store(s_ptr + group * s_step, made, mask=inside & (group * _GROUP < n))
    y = tl.reshape(y * (1.0 / made)[:, :, None], (ROWS, GROUPS * _GROUP))
    tl.store(y_ptr, _quantize(y, FP8), mask=mask)


@triton.jit
def normalise(
    x_ptr, r_ptr, w_ptr, b_ptr, y_ptr, sum_ptr, s_ptr, s_step, inside, n, eps, offset,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr, READ: tl.constexpr, CENTRED: tl.constexpr = False,
    FP8: tl.constexpr = None,
):  # fmt: skip
    """Pointers to x, residual, y, sum and scales are [ROWS, 1]: the starts of rows. What an op does not have is None.

    `tiles.Tiling.constants` says what READ means.
    """
    if READ == "early" or READ == "late":
        _normalise_kept(
            x_ptr, r_ptr, w_ptr, b_ptr, y_ptr, sum_ptr, s_ptr, s_step, inside, n, eps, offset,
            BLOCK, PIECES, READ, CENTRED, FP8,
        )  # fmt: skip
    else:
        _normalise_reread(
            x_ptr, r_ptr, w_ptr, b_ptr, y_ptr, sum_ptr, s_ptr, s_step, inside, n, eps, offset,
            ROWS, BLOCK, READ, CENTRED, FP8,
        )  # fmt: skip


@triton.jit
def _normalise_kept(
    x_ptr, r_ptr, w_ptr, b_ptr, y_ptr, sum_ptr, s_ptr, s_step, inside, n, eps, offset,
    BLOCK: tl.constexpr, PIECES: tl.constexpr, READ: tl.constexpr, CENTRED: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Rows wait in registers for their sums, in pieces; what is loaded of any is in flight before anything waits."""
    PER: tl.constexpr = None if FP8 is None else FP8.per
    cols = tl.arange(0, BLOCK)[None, :]
    x = load_pieces(x_ptr, cols, inside, n, 0.0, PIECES)
    if r_ptr is not None:
        r = load_pieces(r_ptr, cols, inside, n, 0.0, PIECES)
    if READ == "early":
        w, b = _weight_pieces(w_ptr, b_ptr, cols, n, PIECES)
    if r_ptr is not None:
        x = _sum_pieces(x, r, sum_ptr, cols, inside, n, PIECES)
    pdl_launch_dependents()
    if CENTRED:
        x = _centre_pieces(x, cols, inside, n, PIECES)
    squares = x[0].to(tl.float32) * x[0].to(tl.float32)
    for i in tl.static_range(1, PIECES):
        squares += x[i].to(tl.float32) * x[i].to(tl.float32)
    rstd = tl.rsqrt(tl.sum(squares, axis=1, keep_dims=True) / n + eps)
    if READ == "late":
        w, b = _weight_pieces(w_ptr, b_ptr, cols, n, PIECES)
    if PER == "token":
        top = tl.zeros((x[0].shape[0], 1), tl.int32)
        for i in tl.static_range(PIECES):
            y = _weighted(x[i].to(tl.float32) * rstd, w[i], b[i], b_ptr, offset)
            top = tl.maximum(top, _greatest(y, inside_piece(i, cols, inside, n, PIECES)))
        made = _scale(top, FP8)
        tl.store(s_ptr, made, mask=inside)
    for i in tl.static_range(PIECES):
        at, mask = y_ptr + i * BLOCK + cols, inside_piece(i, cols, inside, n, PIECES)
        y = _weighted(x[i].to(tl.float32) * rstd, w[i], b[i], b_ptr, offset)
        if PER == "token":
            tl.store(at, _quantize(y * (1.0 / made), FP8), mask=mask)
        elif PER == "group":
            _write_groups(y, at, s_ptr, s_step, i * BLOCK, n, inside, mask, FP8)
        else:
            tl.store(at, y, mask=mask)


@triton.jit
def _normalise_reread(
    x_ptr, r_ptr, w_ptr, b_ptr, y_ptr, sum_ptr, s_ptr, s_step, inside, n, eps, offset,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, READ: tl.constexpr, CENTRED: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Rows are read block by block, for their mean if they are centred, for their squares, and to be written."""
    PER: tl.constexpr = None if FP8 is None else FP8.per
    cols = tl.arange(0, BLOCK)[None, :]
    # Of two inputs the sum is read again, half of what was read first.
    SUMMED: tl.constexpr = READ == "long" and r_ptr is not None
    # What will not be read again leaves L2 to what will: 512 × 131072 took 147 µs so on an H200, 161 without.
    WRITE: tl.constexpr = "evict_first" if READ == "long" else ""
    if CENTRED:
        total = tl.zeros((ROWS, BLOCK), tl.float32)
        for first in range(0, n, BLOCK):
            total += _read(x_ptr, None, None, first + cols, inside & (first + cols < n), "evict_last")
        mean = tl.sum(total, axis=1, keep_dims=True) / n
    squares = tl.zeros((ROWS, BLOCK), tl.float32)
    tops = tl.zeros((ROWS, BLOCK), tl.int32)
    for first in range(0, n, BLOCK):
        mask = inside & (first + cols < n)
        if SUMMED:
            x = _read(x_ptr, r_ptr, sum_ptr, first + cols, mask, "evict_first")
        else:
            x = _read(x_ptr, r_ptr, None, first + cols, mask, "evict_last")
        if CENTRED:
            x = tl.where(mask, x - mean, 0.0)
        squares += x * x
        if PER == "token":
            w, b = _columns(w_ptr, b_ptr, first + cols, n)
            tops = tl.maximum(tops, magnitude(_weighted(x, w, b, b_ptr, offset)))
    rstd = tl.rsqrt(tl.sum(squares, axis=1, keep_dims=True) / n + eps)
    if SUMMED:
        tl.debug_barrier()  # what other threads wrote is read below
    pdl_launch_dependents()
    if PER == "token":
        top = tl.max(tops, axis=1, keep_dims=True).to(tl.float32, bitcast=True)
        made = _scale(magnitude(top * rstd), FP8)  # rstd is the whole row's: it changes no order
        tl.store(s_ptr, made, mask=inside)
    for first in range(0, n, BLOCK):
        mask = inside & (first + cols < n)
        if SUMMED:
            x = _read(sum_ptr, None, None, first + cols, mask, "evict_first")
        else:
            x = _read(x_ptr, r_ptr, sum_ptr, first + cols, mask, "evict_first")
        if CENTRED:
            x = x - mean
        w, b = _columns(w_ptr, b_ptr, first + cols, n)
        y = _weighted(x * rstd, w, b, b_ptr, offset)
        if PER == "token":
            y = _quantize(y * (1.0 / made), FP8)
            tl.store(y_ptr + first + cols, y, mask=mask, eviction_policy=WRITE)
        elif PER == "group":
            _write_groups(y, y_ptr + first + cols, s_ptr, s_step, first, n, inside, mask, FP8)
        else:
            tl.store(y_ptr + first + cols, y, mask=mask, eviction_policy=WRITE)


# Kernels


@triton.jit(do_not_specialize=["m"])
def _rms_norm(
    x_ptr, w_ptr, y_ptr, x_stride, heads, step, m, n, eps, offset,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr, READ: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    pdl_wait()
    n, x_stride = multiple(n, VECTOR), multiple(x_stride, VECTOR)
    row, inside = own_rows(m, ROWS)
    x_row = x_ptr + (row // heads) * x_stride + (row % heads) * multiple(step, VECTOR)
    y_row = y_ptr + row * n
    normalise(x_row, None, w_ptr, None, y_row, None, None, 0, inside, n, eps, offset, ROWS, BLOCK, PIECES, READ)


@triton.jit(do_not_specialize=["m"])
def _add_rms_norm(
    x_ptr, r_ptr, w_ptr, y_ptr, sum_ptr, x_stride, r_stride, m, n, eps, offset,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr, READ: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    pdl_wait()
    n, x_stride = multiple(n, VECTOR), multiple(x_stride, VECTOR)
    row, inside = own_rows(m, ROWS)
    x_row, r_row = x_ptr + row * x_stride, r_ptr + row * multiple(r_stride, VECTOR)
    y_row, sum_row = y_ptr + row * n, sum_ptr + row * n
    normalise(x_row, r_row, w_ptr, None, y_row, sum_row, None, 0, inside, n, eps, offset, ROWS, BLOCK, PIECES, READ)


@triton.jit(do_not_specialize=["m"])
def _layer_norm(
    x_ptr, w_ptr, b_ptr, y_ptr, x_stride, m, n, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr, READ: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    pdl_wait()
    n, x_stride = multiple(n, VECTOR), multiple(x_stride, VECTOR)
    row, inside = own_rows(m, ROWS)
    x_row, y_row = x_ptr + row * x_stride, y_ptr + row * n
    normalise(
        x_row, None, w_ptr, b_ptr, y_row, None, None, 0, inside, n, eps, 0.0, ROWS, BLOCK, PIECES, READ, CENTRED=True
    )


@triton.jit(do_not_specialize=["m"])
def _rms_norm_fp8(
    x_ptr, w_ptr, y_ptr, s_ptr, x_stride, s_stride, s_step, m, n, eps, offset,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr, READ: tl.constexpr, VECTOR: tl.constexpr,
    FP8: tl.constexpr,
):  # fmt: skip
    pdl_wait()
    n, x_stride = multiple(n, VECTOR), multiple(x_stride, VECTOR)
    row, inside = own_rows(m, ROWS)
    x_row, y_row, s_row = x_ptr + row * x_stride, y_ptr + row * n, s_ptr + row * s_stride
    normalise(
        x_row, None, w_ptr, None, y_row, None, s_row, s_step,
        inside, n, eps, offset, ROWS, BLOCK, PIECES, READ, False, FP8,
    )  # fmt: skip


@triton.jit(do_not_specialize=["m"])
def _add_rms_norm_fp8(
    x_ptr, r_ptr, w_ptr, y_ptr, s_ptr, sum_ptr, x_stride, r_stride, s_stride, s_step, m, n, eps, offset,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr, READ: tl.constexpr, VECTOR: tl.constexpr,
    FP8: tl.constexpr,
):  # fmt: skip
    pdl_wait()
    n, x_stride = multiple(n, VECTOR), multiple(x_stride, VECTOR)
    row, inside = own_rows(m, ROWS)
    x_row, r_row, sum_row = x_ptr + row * x_stride, r_ptr + row * multiple(r_stride, VECTOR), sum_ptr + row * n
    y_row, s_row = y_ptr + row * n, s_ptr + row * s_stride
    normalise(
        x_row, r_row, w_ptr, None, y_row, sum_row, s_row, s_step,
        inside, n, eps, offset, ROWS, BLOCK, PIECES, READ, False, FP8,
    )  # fmt: skip


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
        steps = (args[name] for name in ("x_stride", "step", "r_stride") if name in args)
        constants = {**self.tiling(call).constants(call.x, config), "VECTOR": vector_of(call.x, n, *steps)}
        constants |= self.constants(call)
        grid, options = triton.cdiv(m, config.rows), {"num_warps": config.num_warps}
        return [Launch(self.kernel, grid, args, constants, options, pdl=True)]


class RmsNorm(Norm):
    kernel = _rms_norm

    def tiling(self, call: Call) -> Tiling:
        return Tiling(one_sum=True, in_pieces=True)

    def args(self, call: Call) -> dict[str, Any]:
        _, _, stride, heads, step = two_level_rows(call.x)
        tensors = {"x_ptr": call.x, "w_ptr": call.weight, "y_ptr": call.y}
        return tensors | {"x_stride": stride, "heads": heads, "step": step, "offset": call.offset}


class AddRmsNorm(Norm):
    kernel = _add_rms_norm

    def tiling(self, call: Call) -> Tiling:
        return Tiling(inputs=2, one_sum=True, long=LONG_SUM, wide=8192, in_pieces=True)

    def args(self, call: Call) -> dict[str, Any]:
        tensors = {"x_ptr": call.x, "r_ptr": call.residual, "w_ptr": call.weight}
        tensors |= {"y_ptr": call.y, "sum_ptr": call.residual_out}
        strides = {"x_stride": rows(call.x).stride, "r_stride": rows(call.residual).stride}
        return tensors | strides | {"offset": call.offset}


class LayerNorm(Norm):
    kernel = _layer_norm

    def tiling(self, call: Call) -> Tiling:
        return Tiling(in_pieces=True)

    def args(self, call: Call) -> dict[str, Any]:
        tensors = {"x_ptr": call.x, "w_ptr": call.weight, "b_ptr": call.bias, "y_ptr": call.y}
        return tensors | {"x_stride": rows(call.x).stride}


class RmsNormFp8(Norm):
    kernel = _rms_norm_fp8
    inputs = 1

    def tiling(self, call: Call) -> Tiling:
        least_block = formats.GROUP if call.per == "group" else 1  # whole groups
        long = LONG_ROW if call.per == "token" else LONG_SUM
        return Tiling(self.inputs, least_block=least_block, long=long, in_pieces=True)

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
