"""One program per row, which it reads in blocks: thresholds are found by halving the values between, then one wins."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tilery.base.spec import Artifact, TensorSpec
from tilery.hardware.device import ARCHS
from tilery.languages import triton_glue
from tilery.languages.triton_glue import take_over
from tilery.ops.sample import outputs, quarter
from tilery.parts.rows import rows
from tilery.parts.triton_order import first_of_largest, rank

archs = ARCHS

_SHIFT = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}  # low bits of ranks that say nothing


@dataclass(frozen=True)
class Config:
    block: int  # columns that a program holds at a time
    num_warps: int


def refusal(logits: TensorSpec, config: Config | None = None) -> str | None:
    if config and (config.block < 64 or config.block & (config.block - 1)):
        return f"block must be a power of two from 64 on, got {config.block}"
    if config and config.block > 32 * config.num_warps * 32:
        return f"block of {config.block} does not fit the registers of {config.num_warps} warps"
    return None


def default(logits: TensorSpec) -> Config:
    block = min(max(triton.next_power_of_2(logits.shape[-1]), 64), 8192)
    return Config(block, num_warps=max(block // 256, 1))  # a long row takes a whole processor


def configs(logits: TensorSpec) -> list[Config]:
    most = max(triton.next_power_of_2(logits.shape[-1]), 64)
    pairs = ((2048, 4), (4096, 8), (4096, 16), (8192, 16), (8192, 32), (16384, 32))
    found = [Config(min(block, most), warps) for block, warps in pairs]
    return [c for c in dict.fromkeys(found) if refusal(logits, c) is None]


@triton.jit
def _load(x_ptr, cols, n):
    x = tl.load(x_ptr + cols, mask=cols < n, other=-float("inf")).to(tl.float32)
    return tl.where(x != x, -float("inf"), x)


@triton.jit
def _amount(x_ptr, n, least, top, scale, COUNT: tl.constexpr, BLOCK: tl.constexpr, SHIFT: tl.constexpr):
    """Of values whose rank is at least `least`: how many, or the sum of exp((x - top) · scale)."""
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


@triton_glue.early
@triton.jit(do_not_specialize=["seed_low", "seed_high", "top_k"])
def _sample(
    x_ptr, y_ptr, x_stride, n, quarter, seed_low, seed_high, top_k, temperature, top_p, min_p,
    BLOCK: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    take_over()
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
    tl.store(y_ptr + row, first_of_largest(rank(best), index))


def _signed(word: int) -> int:
    """32 bits as an int32."""
    return (word & 0xFFFFFFFF ^ 0x80000000) - 0x80000000


def _launch(outs, logits, config: Config, seed=0, temperature=0.5, top_k=0, top_p=0.5, min_p=0.5):
    """Arguments and constants, of tensors for `run` and of specs for `compile`."""
    _, n, stride = rows(logits)
    numbers = float(temperature), float(top_p), float(min_p)
    arguments = (logits, outs[0], stride, n, quarter(n), _signed(seed), _signed(seed >> 32), top_k, *numbers)
    return arguments, {"BLOCK": config.block, "SHIFT": _SHIFT[logits.dtype]}


def _options(config: Config) -> dict[str, int]:
    """All registers that a program may have: ptxas would spill some so that more programs fit than there are rows."""
    return {"num_warps": config.num_warps, "maxnreg": min(2**16 // (32 * config.num_warps), 255)}


def compile(specs, config: Config, arch: str) -> Artifact:
    arguments, constants = _launch(outputs(*specs), *specs, config)
    return triton_glue.legacy_compile(_sample, arguments, constants, _options(config), arch)


def run(outs, args, config: Config) -> None:
    logits, *scalars = args
    arguments, constants = _launch(outs, logits, config, *scalars)
    triton_glue.legacy_launch(_sample, (rows(logits).m,), arguments, constants, _options(config))
