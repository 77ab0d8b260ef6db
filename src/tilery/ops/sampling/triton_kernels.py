"""argmax, sample and topk_softmax in Triton."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tilery.base.launch import Launch
from tilery.base.rows import rows
from tilery.core.call import Call
from tilery.core.kernel import Kernel
from tilery.hardware.gpu import ARCHS, gpu
from tilery.languages.triton_glue import pdl_wait
from tilery.ops.memory import philox
from tilery.ops.memory.philox import quarter
from tilery.ops.sampling.triton_topk import TAKEN, keys, largest, rank


@dataclass(frozen=True)
class Config:
    block: int  # columns that a program holds at a time
    num_warps: int


@triton.jit
def _first_of_largest(ranks, index):
    """Index of the largest rank, of equals the lowest."""
    key = (ranks.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)
    return 0x7FFFFFFF - (tl.max(key, axis=0) & 0xFFFFFFFF)


# argmax: a program reads one row once, in blocks. Every lane keeps its largest, and lanes are compared once.


@triton.jit
def _argmax(x_ptr, y_ptr, x_stride, n, BLOCK: tl.constexpr):
    pdl_wait()
    row = tl.program_id(0).to(tl.int64)  # int64: row * stride overflows int32 past 2**31 elements
    x_ptr += row * x_stride
    best = tl.full((BLOCK,), -(2**31), tl.int32)
    index = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, n, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        ranks = rank(tl.load(x_ptr + cols, mask=cols < n, other=0.0).to(tl.float32))
        better = (cols < n) & (ranks > best)
        best = tl.where(better, ranks, best)
        index = tl.where(better, cols, index)
    tl.store(y_ptr + row, _first_of_largest(best, index))


class Argmax(Kernel):
    archs = ARCHS
    Config = Config

    def refusal(self, call: Call, config: Config | None = None) -> str | None:
        if config and config.block > 32 * config.num_warps * 64:
            return f"block of {config.block} does not fit the registers of {config.num_warps} warps"
        return None

    def default(self, call: Call) -> Config:
        block = min(triton.next_power_of_2(call.logits.shape[-1]), 16384)
        return Config(block, num_warps=min(max(block // 512, 1), 16))

    def configs(self, call: Call) -> list[Config]:
        most = triton.next_power_of_2(call.logits.shape[-1])
        found = [Config(min(b, most), w) for b in (512, 4096, 8192, 16384, 32768) for w in (4, 8, 16, 32)]
        return [c for c in dict.fromkeys(found) if self.refusal(call, c) is None]

    def launches(self, call: Call, config: Config) -> list[Launch]:
        m, n, stride = rows(call.logits)
        args = {"x_ptr": call.logits, "y_ptr": call.index, "x_stride": stride, "n": n}
        return [Launch(_argmax, m, args, {"BLOCK": config.block}, {"num_warps": config.num_warps}, pdl=True)]


# sample: a program reads one row several times, in blocks. Thresholds are found by bisection over ranks, then one wins.


@triton.jit
def _load(x_ptr, cols, n):
    x = tl.load(x_ptr + cols, mask=cols < n, other=-float("inf")).to(tl.float32)
    return tl.where(x != x, -float("inf"), x)


@triton.jit
def _amount(x_ptr, n, least, top, scale, COUNT: tl.constexpr, BLOCK: tl.constexpr, SHIFT: tl.constexpr):
    """Count of the values whose rank is at least `least`, or the sum of their exp((x - top) · scale)."""
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = _load(x_ptr, cols, n)
        worth = tl.full((BLOCK,), 1.0, tl.float32) if COUNT else tl.exp((x - top) * scale)
        sums += tl.where((cols < n) & ((rank(x) >> SHIFT) >= least), worth, 0.0)
    return tl.sum(sums, axis=0)


@triton.jit
def _threshold(x_ptr, n, low, wanted, top, scale, COUNT: tl.constexpr, BLOCK: tl.constexpr, SHIFT: tl.constexpr):
    """The largest rank from `low` on whose amount is `wanted` at least."""
    high = (rank(top) >> SHIFT).to(tl.int64) + 1  # int64: half the distance of two ranks may pass 2**31
    while high - low > 1:
        middle = low + (high - low) // 2
        if _amount(x_ptr, n, middle, top, scale, COUNT, BLOCK, SHIFT) >= wanted:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _log_exponential(word):
    """log(-log(1 - u)) of a uniform u: by its series where 1 - u would lose the digits of u."""
    u = tl.minimum(word.to(tl.float32) * 2.0**-32 + 2.0**-33, 1 - 2.0**-24)
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u * (1 / 6))))))
    return tl.log(tl.where(u < 1 / 16, series, -tl.log(1 - u)))


# The integers have types and are not specialized, so that one compiled code serves all their values. The seed comes as
# two words of 32 bits; top_k may be any int64.
@triton.jit(do_not_specialize=["seed_low", "seed_high", "top_k"])
def _sample(
    x_ptr, y_ptr, x_stride, n, quarter, seed_low: tl.int32, seed_high: tl.int32, top_k: tl.int64,
    temperature, top_p, min_p, BLOCK: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    pdl_wait()
    row = tl.program_id(0).to(tl.int64)  # int64: row * stride overflows int32 past 2**31 elements
    x_ptr += row * x_stride
    least, cutoff, scale = tl.full((), -(2**31), tl.int64), -float("inf"), 0.0
    if temperature > 0:
        scale = 1 / temperature
        filtered = ((top_k > 0) & (top_k < n)) | (top_p < 1) | (min_p > 0)
        if filtered:
            tops = tl.full((BLOCK,), -float("inf"), tl.float32)
            for start in range(0, n, BLOCK):
                tops = tl.maximum(tops, _load(x_ptr, start + tl.arange(0, BLOCK), n))
            top = tl.max(tops, axis=0)
            if (top_k > 0) & (top_k < n):
                least = _threshold(x_ptr, n, least >> SHIFT, top_k, top, scale, True, BLOCK, SHIFT)
            else:
                least = least >> SHIFT
            if top_p < 1:
                wanted = top_p * _amount(x_ptr, n, least, top, scale, False, BLOCK, SHIFT)
                least = _threshold(x_ptr, n, least, wanted, top, scale, False, BLOCK, SHIFT)
            if min_p > 0:
                cutoff = top + temperature * tl.log(min_p)

    seed = (seed_high.to(tl.int64) << 32) | (seed_low.to(tl.int64) & 0xFFFFFFFF)
    QUARTER: tl.constexpr = BLOCK // 4
    best = tl.full((QUARTER,), -float("inf"), tl.float32)
    index = tl.zeros((QUARTER,), tl.int32)
    for start in range(0, quarter, QUARTER):
        counter = start + tl.arange(0, QUARTER)
        zero = counter * 0
        words = tl.philox(seed, counter, zero + row.to(tl.int32), zero, zero)
        for j in tl.static_range(4):
            cols = j * quarter + counter
            x = _load(x_ptr, cols, n)
            score = x * scale - _log_exponential(words[j]) if temperature > 0 else x
            kept = (counter < quarter) & (cols < n) & ((rank(x) >> SHIFT) >= least) & (x >= cutoff)
            better = kept & ((score > best) | ((score == best) & (cols < index)))
            best = tl.where(better, score, best)
            index = tl.where(better, cols, index)
    tl.store(y_ptr + row, _first_of_largest(rank(best), index))


_SHIFT = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}  # low bits of ranks that say nothing
_MOST_REGISTERS = 255  # of a thread


class Sample(Kernel):
    archs = ARCHS
    Config = Config

    def refusal(self, call: Call, config: Config | None = None) -> str | None:
        if config and (config.block < 64 or config.block & (config.block - 1)):
            return f"block must be a power of two from 64 on, got {config.block}"
        if config and config.block > 32 * config.num_warps * 32:
            return f"block of {config.block} does not fit the registers of {config.num_warps} warps"
        return None

    def default(self, call: Call) -> Config:
        block = min(max(triton.next_power_of_2(call.logits.shape[-1]), 64), 8192)
        return Config(block, num_warps=max(block // 256, 1))  # a long row takes a whole SM

    def configs(self, call: Call) -> list[Config]:
        most = max(triton.next_power_of_2(call.logits.shape[-1]), 64)
        pairs = ((2048, 4), (4096, 8), (4096, 16), (8192, 16), (8192, 32), (16384, 32))
        found = [Config(min(block, most), warps) for block, warps in pairs]
        return [c for c in dict.fromkeys(found) if self.refusal(call, c) is None]

    def launches(self, call: Call, config: Config) -> list[Launch]:
        m, n, stride = rows(call.logits)
        args = {"x_ptr": call.logits, "y_ptr": call.index, "x_stride": stride, "n": n, "quarter": quarter(n)}
        args |= {
            "seed_low": call.seed.then(philox.low_key),
            "seed_high": call.seed.then(philox.high_key),
            "top_k": call.top_k,
        }
        args |= {"temperature": call.temperature, "top_p": call.top_p, "min_p": call.min_p}
        constants = {"BLOCK": config.block, "SHIFT": _SHIFT[call.logits.dtype]}
        # All registers that a program may have: ptxas would spill some so that more programs fit than there are rows.
        registers = gpu(call.logits.device).registers_per_sm // (32 * config.num_warps)
        options = {"num_warps": config.num_warps, "maxnreg": min(registers, _MOST_REGISTERS)}
        return [Launch(_sample, m, args, constants, options, pdl=True)]


# topk_softmax: a program takes some rows into registers and picks k times the largest of what is left.


@triton.jit
def _topk_softmax(
    x_ptr, weights_ptr, indices_ptr, x_stride, m, n,
    K: tl.constexpr, RENORMALIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    pdl_wait()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = row.to(tl.int64)  # int64: row * stride overflows int32 past 2**31 elements
    cols, places = tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
    inside = (row[:, None] < m) & (cols[None, :] < n)
    x = tl.load(x_ptr + row[:, None] * x_stride + cols[None, :], mask=inside, other=-float("inf")).to(tl.float32)
    top = tl.max(x, axis=1)
    e = tl.exp(x - top[:, None])
    total = tl.sum(e, axis=1)  # NaN of any logit goes into it, and so into every weight

    key = keys(x, cols, n, BLOCK)
    weights = tl.zeros((ROWS, BLOCK_K), tl.float32)
    indices = tl.zeros((ROWS, BLOCK_K), tl.int32)
    for i in range(K):
        index, chosen = largest(key, cols, BLOCK)
        weight = tl.sum(tl.where(chosen, e, 0.0), axis=1)
        key = tl.where(chosen, TAKEN, key)
        weights = tl.where(places[None, :] == i, weight[:, None], weights)
        indices = tl.where(places[None, :] == i, index[:, None], indices)
    if RENORMALIZE:
        total = tl.sum(weights, axis=1)  # NaN is always among them
    weights = weights / total[:, None]
    here = row[:, None] * K + places[None, :]
    mask = (row[:, None] < m) & (places[None, :] < K)
    tl.store(weights_ptr + here, weights, mask=mask)
    tl.store(indices_ptr + here, indices, mask=mask)


@dataclass(frozen=True)
class RowsConfig:
    rows: int  # of a program
    num_warps: int


class TopkRows(Kernel):
    """A kernel that picks the k largest of each row of `call.logits`."""

    archs = ARCHS
    Config = RowsConfig

    def refusal(self, call: Call, config: RowsConfig | None = None) -> str | None:
        if config and config.rows & (config.rows - 1):
            return f"rows must be a power of two, got {config.rows}"
        return None

    def default(self, call: Call) -> RowsConfig:
        """A row for each warp, so that shuffles alone find the largest; one row a program where there are few rows."""
        m, n, _ = rows(call.logits)
        if m >= 1024 and n <= 512:
            return RowsConfig(4, num_warps=4)
        return RowsConfig(1, num_warps=1 if n <= 512 else 2)

    def configs(self, call: Call) -> list[RowsConfig]:
        cuts = ((1, 1), (1, 2), (1, 4), (2, 1), (4, 1), (4, 4), (8, 4))
        return [RowsConfig(count, warps) for count, warps in cuts]


class TopkSoftmax(TopkRows):
    def launches(self, call: Call, config: RowsConfig) -> list[Launch]:
        m, n, stride = rows(call.logits)
        args = {"x_ptr": call.logits, "weights_ptr": call.weights, "indices_ptr": call.indices}
        args |= {"x_stride": stride, "m": m, "n": n}
        constants = {"K": call.k, "RENORMALIZE": call.renormalize, "ROWS": config.rows}
        constants |= {"BLOCK": triton.next_power_of_2(n), "BLOCK_K": triton.next_power_of_2(call.k)}
        programs, options = triton.cdiv(m, config.rows), {"num_warps": config.num_warps}
        return [Launch(_topk_softmax, programs, args, constants, options, pdl=True)]


argmax, sample, topk_softmax = Argmax(), Sample(), TopkSoftmax()
