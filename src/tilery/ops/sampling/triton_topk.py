"""The largest values of rows, one after the other, in Triton: a row waits as integers that order as its values do."""

import triton
import triton.language as tl

TAKEN = tl.constexpr(-(2**63))  # below the key of any value


@triton.jit
def rank(x):
    """An int32 that orders as the fp32 value does, both zeros alike, NaN above all."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0 + 0 is 0
    bits = tl.where(x != x, 0x7FFFFFFF, bits)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def keys(x, cols, n, BLOCK: tl.constexpr):
    """One integer for value and index of x [rows, BLOCK]: the larger value first, then the lower index."""
    key = (rank(x).to(tl.int64) << 32) | (BLOCK - 1 - cols)[None, :]
    return tl.where(cols[None, :] < n, key, TAKEN)


@triton.jit
def largest(key, cols, BLOCK: tl.constexpr):
    """Index of each row's largest [rows], and where it stands [rows, BLOCK]; taken, it sinks below all."""
    best = tl.max(key, axis=1)
    index = BLOCK - 1 - (best & 0xFFFFFFFF).to(tl.int32)
    return index, cols[None, :] == index[:, None]
