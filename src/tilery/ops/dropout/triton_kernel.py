"""A program takes a block of one row; four neighbours share a counter of Philox, unless rows start between them."""

import triton
import triton.language as tl

from tilery.base.spec import Artifact, TensorSpec
from tilery.languages import triton_glue
from tilery.languages.triton_glue import take_over
from tilery.ops.dropout import factor, outputs
from tilery.parts import philox, triton_pieces
from tilery.parts.rows import joined
from tilery.parts.triton_pieces import Config, archs, piece

__all__ = ["Config", "archs", "compile", "configs", "default", "refusal", "run"]


def refusal(x: TensorSpec, config: Config | None = None) -> str | None:
    if config and config.block < 4:
        return f"block must be 4 at least, the words of a counter, got {config.block}"
    return None


def default(x: TensorSpec) -> Config:
    return triton_pieces.default(max(joined(x)[1], 4))


def configs(x: TensorSpec) -> list[Config]:
    return triton_pieces.configs()


@triton.jit
def _words(counter, key0, key1):
    """As parts/philox.py says."""
    seed = (key1.to(tl.int64) << 32) | (key0.to(tl.int64) & 0xFFFFFFFF)
    low = counter.to(tl.uint32)
    return tl.philox(seed, low, (counter >> 32).to(tl.uint32), low * 0, low * 0)


@triton_glue.early
@triton.jit(do_not_specialize=["key0", "key1"])
def _dropout(
    x_ptr, y_ptr, x_stride, n, key0, key1, p, scale,
    QUADS: tl.constexpr, BLOCK: tl.constexpr, PLACE: tl.constexpr,
):  # fmt: skip
    take_over()
    row, start, cols, mask = piece(n, BLOCK, PLACE)
    x = tl.load(x_ptr + row * x_stride + start + cols, mask=mask).to(tl.float32)
    first = row * n + start
    if QUADS:
        w0, w1, w2, w3 = _words(first // 4 + tl.arange(0, BLOCK // 4), key0, key1)
        word = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    else:
        index = first + cols
        w0, w1, w2, w3 = _words(index // 4, key0, key1)
        lane = index % 4
        word = tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3))
    uniform = (word >> 8).to(tl.int32).to(tl.float32) * (1.0 / 16777216)
    tl.store(y_ptr + first + cols, tl.where(uniform >= p, x * scale, 0.0), mask=mask)


def _call(outs, config: Config, x, p, seed):
    """Grid, arguments and constants; of tensors for `run` and of specs for `compile`."""
    m, n, stride = joined(x)
    arguments = x, outs[0], stride, n, *philox.key(seed), float(p), factor(p)
    grid, constants = triton_pieces.cut(m, n, config)
    return grid, arguments, {"QUADS": m == 1 or n % 4 == 0, **constants}


def compile(specs, config: Config, arch: str) -> Artifact:
    _, arguments, constants = _call(outputs(*specs), config, *specs, 0.5, 0)
    return triton_glue.legacy_compile(_dropout, arguments, constants, config.options, arch)


def run(outs, args, config: Config) -> None:
    grid, arguments, constants = _call(outs, config, *args)
    triton_glue.legacy_launch(_dropout, grid, arguments, constants, config.options)
