"""fp8 with scales: the formats, how scales lie in memory, how a value is quantized. For all that make or take them.

A tensor [..., K] is M rows of K. value = fp8 · scale, and scale = max(amax, TINY) / largest, in fp32, where amax is the
largest magnitude among the values that share the scale:

    per      shared by                    scales
    tensor   all                          [1]
    token    a row                        [M, 1]
    group    128 values of a row          [M, ceil(K / 128)]
    block    128 rows × 128 values        [ceil(M / 128), ceil(K / 128)]

The last group or block of a row may be shorter. `layout` is "row" (contiguous) or, for groups, "column": the same
shape, rows next to each other in memory and columns ceil(M / 4) · 4 apart, so that TMA can load a column (16 bytes).
NaN and infinity are carried: their scale is NaN or infinite, so that nothing that depends on them looks sound.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tilery.base.errors import require
from tilery.base.rows import rows
from tilery.base.spec import DTYPES, TensorSpec

GROUP = 128
TINY = 1e-12  # a group of zeros has a scale too
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
PER = ("tensor", "token", "group", "block")
LAYOUTS = ("row", "column")
# Half a step of fp8: one value alone may be off by as much. Each is held to its own step by the element.
ALLOWED = {torch.float8_e4m3fn: 2**-4, torch.float8_e5m2: 2**-3, torch.float32: 1e-6}


def check(per: str, layout: str, format: str, among: tuple[str, ...] = PER) -> None:
    require(per in among, f"per must be one of {', '.join(among)}, got {per!r}")
    require(format in LARGEST, f"format must be one of {', '.join(LARGEST)}, got {format!r}")
    require(layout in LAYOUTS, f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    require(layout == "row" or per == "group", f"layout column is for per='group', got per={per!r}")


def groups(size: int) -> int:
    """Groups or blocks that `size` values or rows make; the last may be shorter."""
    return -(-size // GROUP)


def shared_by(m: int, k: int, per: str) -> tuple[int, int]:
    """Rows and values of a row that share a scale."""
    return {"tensor": (m, k), "token": (1, k), "group": (1, GROUP), "block": (GROUP, GROUP)}[per]


def scale_shape(m: int, k: int, per: str) -> tuple[int, ...]:
    return {"tensor": (1,), "token": (m, 1), "group": (m, groups(k)), "block": (groups(m), groups(k))}[per]


def outputs(x: TensorSpec, per: str, layout: str, format: str) -> dict[str, TensorSpec]:
    """The fp8 values, contiguous and shaped as x, and their scales."""
    m, k, _ = rows(x)
    values = TensorSpec.contiguous(x.shape, DTYPES[format], x.device)
    scales = TensorSpec.contiguous(scale_shape(m, k, per), torch.float32, x.device)
    if layout == "column":
        scales = scales._replace(strides=(1, max(-(-m // 4) * 4, 1)))
    return {"values": values, "scales": scales}


def quantized(y: Tensor, per: str, format: str, pow2: bool) -> tuple[Tensor, Tensor]:
    """The reference: (values, scales), both in y's dtype; values are within what fp8 can hold, and not rounded to it.

    `pow2` rounds scales up to powers of two.
    """
    flat = as_rows(y)
    m, k = flat.shape
    shape = scale_shape(m, k, per)
    if not flat.numel():
        return y.clone(), _scales(y.new_zeros(shape), format, pow2)
    high, wide = shared_by(m, k, per)
    scale = _scales(_tiles(flat, high, wide).abs().amax((1, 3)), format, pow2)
    each = scale.repeat_interleave(high, 0)[:m].repeat_interleave(wide, 1)[:, :k]
    values = (flat / each).clamp(-LARGEST[format], LARGEST[format])  # rounding may step over the edge
    return values.view(y.shape), scale.view(shape)


def quantized_by_torch(x: Tensor, per: str, layout: str, pow2: bool, format: str) -> tuple[Tensor, Tensor]:
    """The baseline: what a user of torch would write."""
    flat = as_rows(x)
    m, k = flat.shape
    tiles = _tiles(flat, *shared_by(m, k, per)).float()
    down, high, across, wide = tiles.shape
    scales = _scales(tiles.abs().amax((1, 3), keepdim=True), format, pow2)
    values = (tiles / scales).clamp(-LARGEST[format], LARGEST[format]).to(DTYPES[format])
    values = values.view(down * high, across * wide)[:m, :k].reshape(x.shape)
    return values, scales.view(scale_shape(m, k, per))


def scale_of_each(scales: Tensor, m: int, k: int, per: str) -> Tensor:
    """A scale for each value of m rows of k, or what broadcasts to that."""
    if per in ("tensor", "token"):
        return scales.view(-1, 1)
    each = scales.repeat_interleave(GROUP, 1)[:, :k]
    return each if per == "group" else each.repeat_interleave(GROUP, 0)[:m]


def as_rows(x: Tensor) -> Tensor:
    """[..., K] as [M, K]."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _tiles(x: Tensor, high: int, wide: int) -> Tensor:
    """[m, k] as [down, high, across, wide], padded with zeros."""
    m, k = x.shape
    down, across = -(-m // high), -(-k // wide)
    return F.pad(x, (0, across * wide - k, 0, down * high - m)).view(down, high, across, wide)


def _scales(amax: Tensor, format: str, pow2: bool) -> Tensor:
    scale = amax.clamp(min=TINY) / LARGEST[format]
    return torch.exp2(torch.ceil(torch.log2(scale))) if pow2 else scale
