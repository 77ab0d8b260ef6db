"""A program takes some rows into registers and picks k times the largest of what is left."""

from dataclasses import dataclass

import triton
import triton.language as tl

from tilery.base.spec import Artifact, TensorSpec
from tilery.hardware.device import ARCHS
from tilery.languages import triton_glue
from tilery.languages.triton_glue import take_over
from tilery.ops.topk_softmax import outputs
from tilery.parts.rows import rows
from tilery.parts.triton_order import rank

archs = ARCHS


@dataclass(frozen=True)
class Config:
    rows: int  # of a program
    num_warps: int


def refusal(logits: TensorSpec, k: int, renormalize: bool, config: Config | None = None) -> str | None:
    if config and config.rows & (config.rows - 1):
        return f"rows must be a power of two, got {config.rows}"
    return None


def default(logits: TensorSpec, k: int, renormalize: bool) -> Config:
    """A row for every warp, so that the largest is found by shuffles alone; one row a program where there are few."""
    m, n, _ = rows(logits)
    return Config(4, num_warps=4) if m >= 1024 and n <= 512 else Config(1, num_warps=1 if n <= 512 else 2)


def configs(logits: TensorSpec, k: int, renormalize: bool) -> list[Config]:
    return [Config(1, 1), Config(1, 2), Config(1, 4), Config(2, 1), Config(4, 1), Config(4, 4), Config(8, 4)]


@triton_glue.early
@triton.jit
def _topk_softmax(
    x_ptr, weights_ptr, indices_ptr, x_stride, m, n,
    K: tl.constexpr, RENORMALIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    take_over()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = row.to(tl.int64)  # int64: row * stride overflows int32 past 2**31 elements
    cols, slots = tl.arange(0, BLOCK), tl.arange(0, SLOTS)
    inside = (row[:, None] < m) & (cols[None, :] < n)
    x = tl.load(x_ptr + row[:, None] * x_stride + cols[None, :], mask=inside, other=-float("inf")).to(tl.float32)
    top = tl.max(x, axis=1)
    e = tl.exp(x - top[:, None])
    total = tl.sum(e, axis=1)  # NaN of any logit goes into it, and so into every weight

    # One integer for value and index: the larger value first, then the lower index. What is taken sinks below all.
    key = (rank(x).to(tl.int64) << 32) | (BLOCK - 1 - cols)[None, :]
    key = tl.where(cols[None, :] < n, key, -(2**63))
    weights = tl.zeros((ROWS, SLOTS), tl.float32)
    indices = tl.zeros((ROWS, SLOTS), tl.int32)
    for i in range(K):
        best = tl.max(key, axis=1)
        index = BLOCK - 1 - (best & 0xFFFFFFFF).to(tl.int32)
        chosen = cols[None, :] == index[:, None]
        weight = tl.sum(tl.where(chosen, e, 0.0), axis=1)
        key = tl.where(chosen, -(2**63), key)
        weights = tl.where(slots[None, :] == i, weight[:, None], weights)
        indices = tl.where(slots[None, :] == i, index[:, None], indices)
    if RENORMALIZE:
        total = tl.sum(weights, axis=1)  # NaN is always among them
    weights = weights / total[:, None]
    here = row[:, None] * K + slots[None, :]
    mask = (row[:, None] < m) & (slots[None, :] < K)
    tl.store(weights_ptr + here, weights, mask=mask)
    tl.store(indices_ptr + here, indices, mask=mask)


def _launch(outs, logits, k: int, renormalize: bool, config: Config):
    """Arguments and constants, of tensors for `run` and of specs for `compile`."""
    m, n, stride = rows(logits)
    constants = {
        "K": k, "RENORMALIZE": renormalize, "ROWS": config.rows,
        "BLOCK": triton.next_power_of_2(n), "SLOTS": triton.next_power_of_2(k),
    }  # fmt: skip
    return (logits, *outs, stride, m, n), constants


def compile(specs, config: Config, arch: str) -> Artifact:
    arguments, constants = _launch(outputs(*specs), *specs, config)
    return triton_glue.legacy_compile(_topk_softmax, arguments, constants, {"num_warps": config.num_warps}, arch)


def run(outs, args, config: Config) -> None:
    arguments, constants = _launch(outs, *args, config)
    grid = (triton.cdiv(rows(args[0]).m, config.rows),)
    triton_glue.legacy_launch(_topk_softmax, grid, arguments, constants, {"num_warps": config.num_warps})
