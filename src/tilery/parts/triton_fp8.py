"""TEMPORARY: old place of what is in ops/quantize/triton_fp8.py."""

import torch

from tilery.base.spec import TensorSpec
from tilery.ops.quantize.triton_fp8 import magnitude as magnitude
from tilery.ops.quantize.triton_fp8 import native as native
from tilery.ops.quantize.triton_fp8 import quantize as quantise  # noqa: F401
from tilery.ops.quantize.triton_fp8 import scale as scale
from tilery.ops.quantize.triton_fp8 import widen as widen


def as_bytes(values):
    return values._replace(dtype=torch.uint8) if isinstance(values, TensorSpec) else values.view(torch.uint8)
