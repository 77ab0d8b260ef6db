"""TEMPORARY: old place of what is in ops/quantize/formats.py."""

from tilery.ops.quantize.formats import *  # noqa: F403
from tilery.ops.quantize.formats import outputs
from tilery.ops.quantize.formats import quantized as quantised  # noqa: F401
from tilery.ops.quantize.formats import scale_of_each as spread  # noqa: F401


def specs(x, per, layout, format):
    return tuple(outputs(x, per, layout, format).values())


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def power(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
