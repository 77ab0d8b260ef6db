"""TEMPORARY: old place of what is in ops/softmax/triton_kernels.py."""

from tilery.ops.softmax.triton_kernels import base, parts, row_sums  # noqa: F401
