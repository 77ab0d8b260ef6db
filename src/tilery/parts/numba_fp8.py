"""TEMPORARY: old place of what is in ops/quantize/numba_fp8.py."""

from tilery.ops.quantize.numba_fp8 import magnitude as magnitude
from tilery.ops.quantize.numba_fp8 import scale as scale
