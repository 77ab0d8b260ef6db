"""Floats as integers in Triton, for kernels that search and compare."""

import triton
import triton.language as tl


@triton.jit
def rank(x):
    """An int32 that orders as the fp32 value does, both zeros alike, NaN above all."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0 + 0 is 0
    bits = tl.where(x != x, 0x7FFFFFFF, bits)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def unrank(rank):
    return (rank ^ ((rank >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def first_of_largest(ranks, index):
    """The index of the largest rank, of equals the lowest."""
    key = (ranks.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)
    return 0x7FFFFFFF - (tl.max(key, axis=0) & 0xFFFFFFFF)
