"""Elements in Numba kernels: reading and writing every dtype as fp32, arithmetic that vectorises, register tiles.

Numba has no fp16, bf16 or fp8, and making a NumPy view of a tensor costs more than a small kernel. So a kernel gets
plain addresses and a number whose type says how elements are stored (`STORAGE`): `load` and `store` convert.
"""

from typing import NamedTuple

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from tilery.base.spec import TensorSpec
from tilery.languages.numba_glue import jit

f32 = np.float32
STORAGE = {
    torch.float32: np.float32(0),
    torch.float16: np.int16(0),
    torch.bfloat16: np.uint16(0),
    torch.float8_e4m3fn: np.int8(0),
    torch.float8_e5m2: np.uint8(0),
}
_FP32, _FP16, _BF16, _E4M3, _E5M2 = (numba.typeof(tag) for tag in STORAGE.values())
FP32 = STORAGE[torch.float32]
# For helpers that take other integers too: Numba would compile them once more for a literal, and whoever holds both.
ZERO, ONE = np.int64(0), np.int64(1)

_FLOAT, _HALF, _I8, _I16, _I32 = ir.FloatType(), ir.HalfType(), ir.IntType(8), ir.IntType(16), ir.IntType(32)
_STORED = {_FP32: _FLOAT, _FP16: _I16, _BF16: _I16, _E4M3: _I8, _E5M2: _I8}
_MACHINE, _, _FEATURES = cpu_target.target_context.codegen().magic_tuple()
_LANES = next((n for feature, n in (("+avx512f", 16), ("+avx2", 8)) if feature in _FEATURES), 4)


def refusal(x: TensorSpec) -> str | None:
    """Without the instruction LLVM would call a function that nobody links, and end the process."""
    if x.dtype == torch.float16 and _MACHINE.startswith("x86") and "+f16c" not in _FEATURES:
        return "fp16 needs a CPU with F16C, or Numba told of it: NUMBA_CPU_FEATURES"
    return None


def _pointer(builder, dtype, address, index):
    return builder.gep(builder.inttoptr(address, _STORED[dtype].as_pointer()), [index])


class _Fp8(NamedTuple):
    """A format of a sign, exponent and mantissa in 8 bits. Its magnitudes, as integers, order as their values do."""

    mantissa: int  # bits
    bias: int
    largest: int  # the magnitude of the largest finite value
    infinity: int  # from here on: infinity, if there is one, and NaN

    @property
    def step(self) -> float:
        """Between the values nearest to 0, where the exponent is at its least."""
        return 2.0 ** (1 - self.bias - self.mantissa)


_FP8 = {_E4M3: _Fp8(3, 7, 0x7E, 0x7F), _E5M2: _Fp8(2, 15, 0x7B, 0x7C)}
_QUIET_NAN = 0x7F


def _widen_fp8(builder, fp8, stored):
    bits = builder.zext(stored, _I32)
    magnitude = builder.and_(bits, _I32(0x7F))
    shifted = builder.shl(magnitude, _I32(23 - fp8.mantissa))
    normal = builder.add(shifted, _I32((127 - fp8.bias) << 23))
    small = builder.bitcast(builder.fmul(builder.sitofp(magnitude, _FLOAT), _FLOAT(fp8.step)), _I32)
    value = builder.select(builder.icmp_signed("<", magnitude, _I32(1 << fp8.mantissa)), small, normal)
    special = builder.or_(shifted, _I32(0x7F800000))  # both formats fill the exponent with ones there
    value = builder.select(builder.icmp_signed(">=", magnitude, _I32(fp8.infinity)), special, value)
    sign = builder.shl(builder.and_(bits, _I32(0x80)), _I32(24))
    return builder.bitcast(builder.or_(value, sign), _FLOAT)


def _round_fp8(builder, fp8, value):
    """To nearest, ties to even; what is too large, infinity too, becomes the largest. NaN stays."""
    bits, dropped = builder.bitcast(value, _I32), 23 - fp8.mantissa
    magnitude = builder.and_(bits, _I32(0x7FFFFFFF))
    odd = builder.and_(builder.lshr(magnitude, _I32(dropped)), _I32(1))
    rounded = builder.add(magnitude, builder.add(odd, _I32((1 << (dropped - 1)) - 1)))
    normal = builder.sub(builder.lshr(rounded, _I32(dropped)), _I32((127 - fp8.bias) << fp8.mantissa))
    # Adding 2**23 steps leaves the count of steps, rounded by the CPU itself, in the low bits.
    shift = ir.Constant(_FLOAT, fp8.step * 2**23)
    counted = builder.fadd(builder.bitcast(magnitude, _FLOAT), shift)
    small = builder.sub(builder.bitcast(counted, _I32), builder.bitcast(shift, _I32))
    tiny = builder.icmp_signed("<", magnitude, _I32((128 - fp8.bias) << 23))
    chosen = builder.select(tiny, small, normal)
    chosen = builder.select(builder.icmp_signed(">", chosen, _I32(fp8.largest)), _I32(fp8.largest), chosen)
    nan = builder.icmp_signed(">", magnitude, _I32(0x7F800000))
    chosen = builder.select(nan, _I32(_QUIET_NAN), chosen)
    sign = builder.and_(builder.lshr(bits, _I32(24)), _I32(0x80))
    return builder.trunc(builder.or_(chosen, sign), _I8)


@intrinsic
def at(typing, address, index, dtype):
    """The address of element `index`."""

    def generate(context, builder, signature, args):
        return builder.add(args[0], builder.mul(args[1], args[1].type(dtype.bitwidth // 8)))

    return types.int64(types.int64, types.int64, dtype), generate


@intrinsic
def load(typing, address, index, dtype):
    """Element `index` as fp32."""

    def generate(context, builder, signature, args):
        value = builder.load(_pointer(builder, dtype, *args[:2]))
        if dtype == _FP16:
            return builder.fpext(builder.bitcast(value, _HALF), _FLOAT)
        if dtype == _BF16:
            return builder.bitcast(builder.shl(builder.zext(value, _I32), _I32(16)), _FLOAT)
        return _widen_fp8(builder, _FP8[dtype], value) if dtype in _FP8 else value

    return types.float32(types.int64, types.int64, dtype), generate


@intrinsic
def store(typing, address, index, value, dtype):
    """Writes an fp32 value as element `index`, rounded to nearest, ties to even; fp8 saturates."""

    def generate(context, builder, signature, args):
        value = args[2]
        if dtype == _FP16:
            value = builder.bitcast(builder.fptrunc(value, _HALF), _I16)
        elif dtype == _BF16:
            bits = builder.bitcast(value, _I32)
            odd = builder.and_(builder.lshr(bits, _I32(16)), _I32(1))
            rounded = builder.add(bits, builder.add(odd, _I32(0x7FFF)))
            quiet = builder.or_(bits, _I32(0x400000))  # a NaN would round to infinity if its bits were added to
            bits = builder.select(builder.fcmp_unordered("uno", value, value), quiet, rounded)
            value = builder.trunc(builder.lshr(bits, _I32(16)), _I16)
        elif dtype in _FP8:
            value = _round_fp8(builder, _FP8[dtype], value)
        builder.store(value, _pointer(builder, dtype, *args[:2]))

    return types.void(types.int64, types.int64, types.float32, dtype), generate


@intrinsic
def move(typing, source, i, target, j, dtype):
    """Copies element i of `source` to element j of `target`, bits as they are."""

    def generate(context, builder, signature, args):
        value = builder.load(_pointer(builder, dtype, *args[:2]))
        builder.store(value, _pointer(builder, dtype, *args[2:4]))

    return types.void(types.int64, types.int64, types.int64, types.int64, dtype), generate


@intrinsic
def _integer(typing, address, index, kind):
    def generate(context, builder, signature, args):
        stored = ir.IntType(kind.bitwidth)
        value = builder.load(builder.gep(builder.inttoptr(args[0], stored.as_pointer()), [args[1]]))
        return value if kind.bitwidth == 64 else builder.sext(value, ir.IntType(64))

    return types.int64(types.int64, types.int64, kind), generate


_INT32, _INT64 = np.int32(0), np.int64(0)


@jit
def integer(address, index, size):
    """Integer `index` of a tensor of int32 or int64, told by the bytes of one: positions need no kernel each."""
    return _integer(address, index, _INT64) if size == 8 else _integer(address, index, _INT32)


@intrinsic
def _store_integer(typing, address, index, value, kind):
    def generate(context, builder, signature, args):
        stored = ir.IntType(kind.bitwidth)
        value = args[2] if kind.bitwidth == 64 else builder.trunc(args[2], stored)
        builder.store(value, builder.gep(builder.inttoptr(args[0], stored.as_pointer()), [args[1]]))

    return types.void(types.int64, types.int64, types.int64, kind), generate


@jit
def store_integer(address, index, value, size):
    """Writes an int64 value as integer `index` of a tensor of int32 or int64, told by the bytes of one."""
    if size == 8:
        _store_integer(address, index, value, _INT64)
    else:
        _store_integer(address, index, value, _INT32)


# Arithmetic


def _flip(builder, bits):
    return builder.xor(bits, builder.and_(builder.ashr(bits, _I32(31)), _I32(0x7FFFFFFF)))


@intrinsic
def rank(typing, value):
    """An integer that orders as the float does: LLVM makes vectors of a maximum of floats only if it may ignore NaN."""

    def generate(context, builder, signature, args):
        return _flip(builder, builder.bitcast(args[0], _I32))

    return types.int32(types.float32), generate


@intrinsic
def unrank(typing, value):
    def generate(context, builder, signature, args):
        return builder.bitcast(_flip(builder, args[0]), _FLOAT)

    return types.float32(types.int32), generate


@jit
def row_max(x, n, dtype):
    """The maximum of n elements; NaN of either sign may come out of a row that has one."""
    top = rank(f32(-np.inf))
    for j in range(n):
        top = max(top, rank(load(x, j, dtype)))
    return unrank(top)


@intrinsic
def _half_power(typing, shifted):
    """2**(n - 1) of n + 1.5 * 2**23: n stands in the low bits of the mantissa."""

    def generate(context, builder, signature, args):
        bits = builder.shl(builder.bitcast(args[0], _I32), _I32(23))
        return builder.bitcast(builder.add(bits, _I32(126 << 23)), _FLOAT)

    return types.float32(types.float32), generate


_LEAST, _MOST, _SHIFT = f32(-87.6), f32(89), f32(1.5 * 2**23)
_LOG2E, _LN2_HIGH, _LN2_LOW = f32(1 / np.log(2)), f32(0.693145751953125), f32(np.log(2) - 0.693145751953125)
_C0, _C1, _C2, _C3, _C4, _C5, _C6, _C7 = (f32(2 / c) for c in (1, 1, 2, 6, 24, 120, 720, 5040))


@numba.njit(fastmath={"contract"}, forceinline=True)  # no reassoc: it would undo the shift and join the halves of ln 2
def exp(x):
    """exp(x) = 2**n · exp(r), r = x - n ln 2, to 1e-7; 0 below -87. As 2 exp(r) · 2**(n - 1) it overflows rightly."""
    x = _LEAST if x < _LEAST else x  # written so that NaN stays
    x = _MOST if x > _MOST else x
    shifted = x * _LOG2E + _SHIFT
    n = shifted - _SHIFT
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    series = ((((((_C7 * r + _C6) * r + _C5) * r + _C4) * r + _C3) * r + _C2) * r + _C1) * r + _C0
    return series * _half_power(shifted)


# Matrix products

_VECTOR = ir.VectorType(_FLOAT, _LANES)
_VECTORS = 2
ROWS, COLUMNS = (6 if _LANES == 8 else 12), _VECTORS * _LANES  # sums in registers: AVX2 has 16 of them, the others 32
DEPTH = 256


@intrinsic
def multiply(typing, a, b, c, c_stride, k):
    """c [ROWS, COLUMNS] += a [ROWS, k] · b [k, COLUMNS], all fp32; the rows of a are DEPTH apart.

    In LLVM's words, since the sums of Numba's own loops would live in memory.
    """

    def generate(context, builder, signature, args):
        def pointer(address, kind, index):
            return builder.gep(builder.inttoptr(address, kind.as_pointer()), [index])

        a, b, c, c_stride, k = args
        i64 = k.type
        zeros, first = ir.Constant(_VECTOR, None), ir.Constant(ir.VectorType(_I32, _LANES), None)
        sums = [[cgutils.alloca_once_value(builder, zeros) for _ in range(_VECTORS)] for _ in range(ROWS)]
        with cgutils.for_range(builder, k) as loop:
            start = pointer(b, _VECTOR, builder.mul(loop.index, i64(_VECTORS)))
            vectors = [builder.load(builder.gep(start, [i64(v)]), align=4) for v in range(_VECTORS)]
            for r in range(ROWS):
                scalar = builder.load(pointer(a, _FLOAT, builder.add(loop.index, i64(r * DEPTH))))
                spread = builder.shuffle_vector(builder.insert_element(zeros, scalar, _I32(0)), zeros, first)
                for total, vector in zip(sums[r], vectors):
                    product = builder.fmul(spread, vector, flags=("contract",))
                    builder.store(builder.fadd(builder.load(total), product, flags=("contract",)), total)
        for r in range(ROWS):
            for v, total in enumerate(sums[r]):
                target = pointer(builder.add(c, builder.mul(c_stride, i64(4 * r))), _VECTOR, i64(v))
                builder.store(builder.fadd(builder.load(target, align=4), builder.load(total)), target, align=4)

    return types.void(types.int64, types.int64, types.int64, types.int64, types.int64), generate
