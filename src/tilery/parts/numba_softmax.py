"""TEMPORARY: old place of what is in ops/softmax/numba_kernels.py."""

from tilery.ops.softmax.numba_kernels import base, row_sums  # noqa: F401
