"""Rows between memory and a core, for Numba kernels: asked for ahead, and written past the caches.

A store has its line read from memory first, and the line pushes out another. Where the caches cannot hold the result
anyway, a block of it is made in the L1 cache and moved to memory in whole lines, which need not be read.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tilery.languages import numba_glue
from tilery.languages.numba_elements import at

BLOCK = 256  # elements at a time: with 1024 a Zen 4 core waits for what it asked for, and softmax takes 30 % longer
LINE = 64  # bytes
# Bytes of a result. With 32 MiB of L3, softmax, its backward and whoever reads their result took 7 to 19 % less time at
# 32 MiB in fp32; a copy of 16 MiB from the caches and its reader took half as long again. Kernels are told it at every
# launch, so that a test may lower it.
LEAST = 2**25

_I8, _I32 = ir.IntType(8), ir.IntType(32)
_VECTOR = ir.VectorType(_I32, LINE // 4)


@intrinsic
def _fetch(typing, address):
    """Asks for a line to be in the L2 cache; any address will do, also one that is nobody's."""

    def generate(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], _I8.as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, _I32, _I32, _I32])
        fetch = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], kind)
        builder.call(fetch, [pointer, _I32(0), _I32(2), _I32(1)])  # to read, in L2, data

    return types.void(types.int64), generate


def store_past(builder, vector, pointer):
    """In LLVM's words: writes a whole line that is not read."""
    store = builder.store(vector, pointer, align=LINE)
    store.set_metadata("nontemporal", builder.module.add_metadata([_I32(1)]))


@intrinsic
def _move_line(typing, source, target):
    def generate(context, builder, signature, args):
        source, target = (builder.inttoptr(address, _VECTOR.as_pointer()) for address in args)
        store_past(builder, builder.load(source, align=1), target)

    return types.void(types.int64, types.int64), generate


@intrinsic
def finish(typing):
    """After the last line that this thread moved: what it does next must not be seen before them."""

    def generate(context, builder, signature, args):
        builder.fence("seq_cst")

    return types.void(), generate


@numba_glue.jit
def ahead(x, count, dtype):
    """Asks for `count` elements: for a block of the next row while this row's is computed."""
    for offset in range(0, at(0, count, dtype), LINE):
        _fetch(x + offset)


@numba_glue.jit
def too_large(y, m, n, least, dtype):
    """Whether rows of y are to be moved past the caches: they have `least` bytes or more, and each begins on a line."""
    row = at(0, n, dtype)
    return m * row >= least and y % LINE == 0 and row % LINE == 0


@numba_glue.jit
def buffer(count):
    """Room for `count` values of fp32. The array must be kept until the last use of the address, which is on a line."""
    held = np.empty(count + LINE // 4, np.float32)
    return held, (np.int64(held.ctypes.data) + LINE - 1) // LINE * LINE


@numba_glue.jit
def stream(block, target, count, dtype):
    """Moves `count` elements, whole lines, from a block in the L1 cache to memory."""
    for offset in range(0, at(0, count, dtype), LINE):
        _move_line(block + offset, target + offset)
