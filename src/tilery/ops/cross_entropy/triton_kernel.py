"""One program per row, which it reads once, in blocks, with a running maximum; of many rows, not those to ignore."""

from dataclasses import dataclass

import triton
import triton.language as tl

from tilery.base.spec import Artifact, TensorSpec
from tilery.hardware.device import ARCHS
from tilery.languages import triton_glue
from tilery.languages.triton_glue import hand_over, take_over
from tilery.ops.cross_entropy import outputs
from tilery.parts import triton_losses
from tilery.parts.losses import FEW
from tilery.parts.rows import rows
from tilery.parts.triton_softmax import parts, row_sums

archs = ARCHS

_MOST_VALUES = 64  # a lane: a maximum, a sum of exponentials and a plain one run over all of them


@dataclass(frozen=True)
class Config:
    block: int  # columns that a program holds at a time
    num_warps: int


def refusal(logits: TensorSpec, targets: TensorSpec, config: Config | None = None) -> str | None:
    if config and config.block > 32 * config.num_warps * _MOST_VALUES:
        return f"block of {config.block} does not fit the registers of {config.num_warps} warps"
    return None


def default(logits: TensorSpec, targets: TensorSpec) -> Config:
    block = min(triton.next_power_of_2(logits.shape[-1]), 8192)
    if rows(logits).m > FEW:
        return Config(block, num_warps=min(max(block // 512, 1), 8))
    each = 1024 if logits.shape[-1] % 16 == 0 else 256  # fewer where each is an access of its own
    # 1 × 1024 on an H200: 1.47 µs with four warps, 1.59 with two; 16 × 4096: 2.3 with four, 2.7 with eight
    return Config(block, num_warps=min(max(block // each, min(block // 256, 4), 1), 16))


def configs(logits: TensorSpec, targets: TensorSpec) -> list[Config]:
    most = triton.next_power_of_2(logits.shape[-1])
    found = [Config(min(b, most), w) for b in (512, 2048, 4096, 8192, 16384) for w in (4, 8, 16)]
    return [c for c in dict.fromkeys(found) if refusal(logits, targets, c) is None]


@triton.jit
def _of_row(logits_ptr, target, n, label_smoothing, z_loss, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    hand_over()
    inside = (target >= 0) & (target < n)
    picked = tl.load(logits_ptr + target, mask=inside, other=float("nan")).to(tl.float32)  # under way before sums wait
    top, total, plain = row_sums(logits_ptr, 0, n, BLOCK, PARTS, True)
    lse = triton_losses.log_sum(top, total)
    return triton_losses.loss(lse, picked, plain, n, label_smoothing, z_loss), lse


@triton_glue.early
@triton.jit(do_not_specialize=["ignore_index"])
def _cross_entropy(
    logits_ptr, targets_ptr, loss_ptr, lse_ptr, stride, n, ignore_index, label_smoothing, z_loss,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, EAGER: tl.constexpr,
):  # fmt: skip
    take_over()
    row = tl.program_id(0).to(tl.int64)  # int64: row * stride overflows int32 past 2**31 elements
    target = tl.load(targets_ptr + row)
    logits_ptr += row * stride
    loss, lse, counts = 0.0, 0.0, target != ignore_index
    if EAGER:  # no row waits for its target
        loss, lse = _of_row(logits_ptr, target, n, label_smoothing, z_loss, BLOCK, PARTS)
        loss, lse = tl.where(counts, loss, 0.0), tl.where(counts, lse, 0.0)
    elif counts:
        loss, lse = _of_row(logits_ptr, target, n, label_smoothing, z_loss, BLOCK, PARTS)
    tl.store(loss_ptr + row, loss)
    tl.store(lse_ptr + row, lse)


def _arguments(outs, logits, targets, label_smoothing=0.1, ignore_index=-100, z_loss=0.1):
    """The launch arguments, of tensors for `run` and of specs for `compile`."""
    _, n, stride = rows(logits)
    return logits, targets, *outs, stride, n, ignore_index, float(label_smoothing), float(z_loss)


def _constants(logits, config: Config) -> dict[str, int]:
    sizes = {"BLOCK": config.block, "PARTS": parts(logits, config.block, config.num_warps)}
    return sizes | {"EAGER": rows(logits).m <= FEW}


def compile(specs, config: Config, arch: str) -> Artifact:
    arguments, options = _arguments(outputs(*specs), *specs), {"num_warps": config.num_warps}
    return triton_glue.legacy_compile(_cross_entropy, arguments, _constants(specs[0], config), options, arch)


def run(outs, args, config: Config) -> None:
    grid = (rows(args[0]).m,)
    arguments, options = _arguments(outs, *args), {"num_warps": config.num_warps}
    triton_glue.legacy_launch(_cross_entropy, grid, arguments, _constants(args[0], config), options)
