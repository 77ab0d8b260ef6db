"""fp8 with scales: the formats, how scales lie in memory, how a value is quantised. For all that make or take them.

A tensor [..., K] is M rows of K. value = fp8 · scale, and scale = max(amax, TINY) / largest, in fp32, where amax is the
largest magnitude among the values that share the scale:

    per      shared by                    scales
    tensor   all                          [1]
    token    a row                        [M, 1]
    group    128 values of a row          [M, ceil(K / 128)]
    block    128 rows × 128 values        [ceil(M / 128), ceil(K / 128)]

The last group or block of a row may be shorter. `layout` is "row" (contiguous) or, for groups, "column": the same
shape, rows next to each other in memory and columns ceil(M / 4) · 4 apart, so that TMA can fetch a column (16 bytes).
NaN and infinity are carried: their scale is NaN or infinite, so that nothing that depends on them looks sound.
"""

import math

import torch
from torch import Tensor

from tilery.base.errors import require
from tilery.base.spec import DTYPES, TensorSpec
from tilery.parts.rows import rows

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


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def power(n: int) -> int:
    """The power of two from n on; Triton's own function, and its cdiv, take 8 µs each."""
    return 1 << max(n - 1, 0).bit_length()


def scale_shape(m: int, k: int, per: str) -> tuple[int, ...]:
    return {
        "tensor": (1,),
        "token": (m, 1),
        "group": (m, ceil_div(k, GROUP)),
        "block": (ceil_div(m, GROUP), ceil_div(k, GROUP)),
    }[per]


def specs(x: TensorSpec, per: str, layout: str, format: str) -> tuple[TensorSpec, TensorSpec]:
    """Of the fp8 tensor, contiguous and shaped as x, and of its scales."""
    m, k, _ = rows(x)
    values = TensorSpec.contiguous(x.shape, DTYPES[format], x.device)
    scales = TensorSpec.contiguous(scale_shape(m, k, per), torch.float32, x.device)
    if layout == "column":
        scales = scales._replace(strides=(1, max(ceil_div(m, 4) * 4, 1)))
    return values, scales


def quantised(y: Tensor, per: str, format: str, pow2: bool) -> tuple[Tensor, Tensor]:
    """The reference: (values, scales), both as y's dtype; values are within what fp8 can hold, and not rounded to it.

    `pow2` rounds scales up to powers of two.
    """
    k = y.shape[-1]
    m = math.prod(y.shape[:-1])
    flat = y.reshape(m, k)
    high, wide = {"tensor": (m, k), "token": (1, k), "group": (1, GROUP), "block": (GROUP, GROUP)}[per]
    shape = scale_shape(m, k, per)
    if not flat.numel():
        return y.clone(), _scales(y.new_zeros(shape), format, pow2)
    across, down = ceil_div(k, wide), ceil_div(m, high)
    padded = torch.nn.functional.pad(flat, (0, across * wide - k, 0, down * high - m))
    amax = padded.view(down, high, across, wide).abs().amax((1, 3))
    scale = _scales(amax, format, pow2)
    each = scale.repeat_interleave(high, 0)[:m].repeat_interleave(wide, 1)[:, :k]
    values = (flat / each).clamp(-LARGEST[format], LARGEST[format])  # rounding may step over the edge
    return values.view(y.shape), scale.view(shape)


def _scales(amax: Tensor, format: str, pow2: bool) -> Tensor:
    scale = amax.clamp(min=TINY) / LARGEST[format]
    return torch.exp2(torch.ceil(torch.log2(scale))) if pow2 else scale
