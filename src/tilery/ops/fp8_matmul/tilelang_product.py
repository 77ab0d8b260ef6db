"""A block per tile of c, or per tile and part of K; T.gemm adds 128 products, which are scaled and added in fp32.

With swapAB the tile is that of cᵀ = b · aᵀ: wgmma wants 64 rows, and takes as few as 8 columns. With splitK the parts
lie in a workspace, and a second launch adds them in order.
"""
# TileLang's annotations are calls:
# mypy: ignore-errors

from typing import Any, NamedTuple

import tilelang.language as T

from tilery.base.integers import ceil_div
from tilery.ops.quantize.formats import GROUP

_ADDED = 512  # elements of c that a block of the second launch adds up


class Specialization(NamedTuple):
    """What a kernel is built for, besides its config; M and strides are its arguments."""

    n: int
    k: int
    format: str  # of a and b
    out: str
    even: bool  # TMA can describe a and b
    a_ones: tuple[bool, ...]  # which strides of a_scale are 1
    b_ones: tuple[bool, ...]


def product(of: Specialization, config: Any):
    n, k, format, out, even, a_ones, b_ones = of
    # Of a single row TileLang would load 16 bytes at a time, from where that may not be aligned.
    b_rows = n if even else T.dynamic("b_rows")
    m, lda, ldb = T.dynamic("m"), T.dynamic("lda", "int64"), T.dynamic("ldb", "int64")
    a_steps = tuple(1 if one else T.dynamic(f"a_step{d}", "int64") for d, one in enumerate(a_ones))
    b_steps = tuple(1 if one else T.dynamic(f"b_step{d}", "int64") for d, one in enumerate(b_ones))
    swapped, parts, (rows, columns) = config.swapped, config.split_k, config.tile
    blocks, high, count = k // GROUP, ceil_div(n, GROUP), k // GROUP // parts
    stages = config.num_stages if even else 0  # element by element there is nothing asynchronous to pipeline
    sums = config.block_m, config.block_n
    # Rows for every warpgroup where there are 64: wgmma then reads b's tile once for all of them.
    apart = T.GemmWarpPolicy.FullRow if config.block_m * 2 >= config.threads else T.GemmWarpPolicy.Square
    light = config.block_m * config.block_n // config.threads <= 32  # sums and products take few of the registers
    in_shared = config.a_scale_shm or config.b_scale_shm

    @T.macro
    def multiply(a, a_scale, b, b_scale, c, i, j, z):
        if even:  # what makes TMA of the loads below
            T.assume(lda % 16 == 0)
            T.assume(ldb % 16 == 0)
        if light:  # setmaxnreg would give a block all registers of an SM, and here several blocks fit
            T.no_set_max_nreg()
        a_tile = T.alloc_shared((rows, GROUP), format)
        b_tile = T.alloc_shared((columns, GROUP), format)
        c_tile = T.alloc_shared((rows, columns), out if parts == 1 else "float32")
        own = T.alloc_fragment((rows,), "float32")
        a_scales = T.alloc_shared((rows,), "float32") if in_shared else own
        scales = own if config.c_scale_local else T.alloc_shared((rows,), "float32")
        part = T.alloc_fragment(sums, "float32")
        acc = T.alloc_fragment(sums, "float32")
        T.clear(acc)
        for step in T.Pipelined(count, num_stages=stages):  # copies give zeros outside a and b
            block = z * count + step
            T.copy(a[i * rows, block * GROUP], a_tile, disable_tma=not even)
            T.copy(b[j * columns, block * GROUP], b_tile, disable_tma=not even)
            if in_shared:
                for r in T.Parallel(rows):
                    a_scales[r] = a_scale[i * rows + r, block]
                for r in T.Parallel(rows):
                    own[r] = a_scales[r] * b_scale[j * columns // GROUP, block]
            else:
                for r in T.Parallel(rows):
                    own[r] = a_scale[i * rows + r, block] * b_scale[j * columns // GROUP, block]
            if not config.c_scale_local:
                # By way of registers, so that the warps that multiply write them: those that load are told too early
                # that a step's place is free, when T.gemm is done and the sum below still reads.
                T.copy(own, scales)
            if swapped:
                T.gemm(b_tile, a_tile, part, transpose_B=True, policy=apart, clear_accum=True)
                for r, s in T.Parallel(columns, rows):
                    acc[r, s] += part[r, s] * scales[s]
            else:
                T.gemm(a_tile, b_tile, part, transpose_B=True, policy=apart, clear_accum=True)
                for r, s in T.Parallel(rows, columns):
                    acc[r, s] += part[r, s] * scales[r]
        if swapped:
            for r, s in T.Parallel(columns, rows):
                c_tile[s, r] = acc[r, s]
        else:
            T.copy(acc, c_tile)
        if parts == 1:
            T.copy(c_tile, c[i * rows, j * columns])
        else:
            T.copy(c_tile, c[z, i * rows, j * columns])

    if parts == 1:

        @T.prim_func
        def whole(
            a: T.StridedTensor((m, k), (lda, 1), format),
            a_scale: T.StridedTensor((m, blocks), a_steps, "float32"),
            b: T.StridedTensor((b_rows, k), (ldb, 1), format),
            b_scale: T.StridedTensor((high, blocks), b_steps, "float32"),
            c: T.Tensor((m, n), out),
        ):
            with T.Kernel(T.ceildiv(m, rows), T.ceildiv(n, columns), threads=config.threads) as (i, j):
                T.use_swizzle(8, order="column")
                multiply(a, a_scale, b, b_scale, c, i, j, 0)

        return whole

    @T.prim_func
    def split(
        a: T.StridedTensor((m, k), (lda, 1), format),
        a_scale: T.StridedTensor((m, blocks), a_steps, "float32"),
        b: T.StridedTensor((b_rows, k), (ldb, 1), format),
        b_scale: T.StridedTensor((high, blocks), b_steps, "float32"),
        c: T.Tensor((m, n), out),
        c_parts: T.Tensor((parts, m, n), "float32"),
    ):
        with T.Kernel(T.ceildiv(m, rows), T.ceildiv(n, columns), parts, threads=config.threads) as (i, j, z):
            multiply(a, a_scale, b, b_scale, c_parts, i, j, z)
        with T.Kernel(m, T.ceildiv(n, _ADDED), threads=128) as (i, j):
            total = T.alloc_fragment((_ADDED,), "float32")
            T.clear(total)
            for z in T.serial(parts):  # always in the same order: ten runs give the same bits
                for r in T.Parallel(_ADDED):
                    total[r] += c_parts[z, i, j * _ADDED + r]
            for r in T.Parallel(_ADDED):
                c[i, j * _ADDED + r] = total[r]

    return split
