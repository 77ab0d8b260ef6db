"""cross_entropy in Triton, with its backward.

Forward: a program reads one row once, in blocks, with a running maximum. Backward: a program takes a block of one row;
lse is known, so no element waits for another.
"""

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from tilery.base.launch import Launch
from tilery.base.rows import rows
from tilery.core.kernel import Kernel
from tilery.hardware.gpu import ARCHS
from tilery.languages.triton_glue import pdl_launch_dependents, pdl_wait
from tilery.ops.losses.call import READ_IGNORED_UP_TO, LossCall
from tilery.ops.softmax.triton_kernels import base, parts, row_sums

# Formulas


@triton.jit
def log_sum(top, total):
    """log(sum(exp(x))) from max(x) and sum(exp(x - base(max(x))))."""
    return base(top) + tl.log(total)


@triton.jit
def row_loss(lse, target_logit, logit_sum, n, label_smoothing, z_loss):
    """Loss of a row that is not ignored; `logit_sum` is the sum of its n logits."""
    smooth = tl.where(label_smoothing > 0, label_smoothing * (logit_sum / n), 0.0)
    return lse - (1 - label_smoothing) * target_logit - smooth + z_loss * lse * lse


@triton.jit
def gradient(logits, column, target, n, dloss, dlse, lse, label_smoothing, z_loss):
    """Gradients of the logits of classes `column`; NaN where the target, if not ignored, is no class."""
    dloss = tl.where((target >= 0) & (target < n), dloss, float("nan"))
    scale = dloss * (1 + 2 * z_loss * lse) + dlse
    at_target = tl.where(column == target, dloss * (1 - label_smoothing), 0.0)
    return tl.exp(logits - lse) * scale - at_target - dloss * label_smoothing / n


@dataclass(frozen=True)
class Config:
    block: int  # columns that a program holds at a time
    num_warps: int


# cross_entropy. ignore_index has a type and is not specialized, so that one compiled code serves every int64.


@triton.jit
def _row(logits_ptr, target, n, label_smoothing, z_loss, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    pdl_launch_dependents()
    inside = (target >= 0) & (target < n)
    # Loaded before the sums, so that it does not wait for them.
    target_logit = tl.load(logits_ptr + target, mask=inside, other=float("nan")).to(tl.float32)
    top, total, logit_sum = row_sums(logits_ptr, 0, n, BLOCK, PARTS, True)
    lse = log_sum(top, total)
    return row_loss(lse, target_logit, logit_sum, n, label_smoothing, z_loss), lse


@triton.jit(do_not_specialize=["ignore_index"])
def _cross_entropy(
    logits_ptr, targets_ptr, loss_ptr, lse_ptr, stride, n, ignore_index: tl.int64, label_smoothing, z_loss,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, READ_IGNORED: tl.constexpr,
):  # fmt: skip
    pdl_wait()
    row = tl.program_id(0).to(tl.int64)  # int64: row * stride overflows int32 past 2**31 elements
    target = tl.load(targets_ptr + row)
    logits_ptr += row * stride
    loss, lse, counts = 0.0, 0.0, target != ignore_index
    if READ_IGNORED:  # no row waits for its target
        loss, lse = _row(logits_ptr, target, n, label_smoothing, z_loss, BLOCK, PARTS)
        loss, lse = tl.where(counts, loss, 0.0), tl.where(counts, lse, 0.0)
    elif counts:
        loss, lse = _row(logits_ptr, target, n, label_smoothing, z_loss, BLOCK, PARTS)
    tl.store(loss_ptr + row, loss)
    tl.store(lse_ptr + row, lse)


class CrossEntropy(Kernel):
    archs = ARCHS
    Config = Config
    values_per_lane = 64  # a maximum, a sum of exponentials and a plain one run over all of them
    read_ignored_up_to = READ_IGNORED_UP_TO

    def refusal(self, call: LossCall, config: Config | None = None) -> str | None:
        if config and config.block > 32 * config.num_warps * self.values_per_lane:
            return f"block of {config.block} does not fit the registers of {config.num_warps} warps"
        return None

    def default(self, call: LossCall) -> Config:
        m, n, _ = rows(call.logits)
        block = min(triton.next_power_of_2(n), 8192)
        if m > self.read_ignored_up_to:
            return Config(block, num_warps=min(max(block // 512, 1), 8))
        each = 1024 if n % 16 == 0 else 256  # fewer where each is an access of its own
        # 1 × 1024 on an H200: 1.47 µs with four warps, 1.59 with two; 16 × 4096: 2.3 with four, 2.7 with eight
        return Config(block, num_warps=min(max(block // each, min(block // 256, 4), 1), 16))

    def configs(self, call: LossCall) -> list[Config]:
        most = triton.next_power_of_2(call.n)
        found = [Config(min(b, most), w) for b in (512, 2048, 4096, 8192, 16384) for w in (4, 8, 16)]
        return [c for c in dict.fromkeys(found) if self.refusal(call, c) is None]

    def launches(self, call: LossCall, config: Config) -> list[Launch]:
        m, n, stride = rows(call.logits)
        args = {"logits_ptr": call.logits, "targets_ptr": call.targets, "loss_ptr": call.loss, "lse_ptr": call.lse}
        args |= {"stride": stride, "n": n, **scalars(call)}
        constants = {"BLOCK": config.block, "PARTS": parts(call.logits, config.block, config.num_warps)}
        constants |= {"READ_IGNORED": m <= self.read_ignored_up_to}
        return [Launch(_cross_entropy, m, args, constants, {"num_warps": config.num_warps}, pdl=True)]


def scalars(call: LossCall) -> dict[str, Any]:
    return {name: getattr(call, name) for name in ("ignore_index", "label_smoothing", "z_loss")}


@triton.jit(do_not_specialize=["ignore_index"])
def _cross_entropy_backward(
    dloss_ptr, dlse_ptr, logits_ptr, targets_ptr, lse_ptr, dlogits_ptr, stride, n,
    ignore_index: tl.int64, label_smoothing, z_loss, BLOCK: tl.constexpr,
):  # fmt: skip
    pdl_wait()
    blocks = tl.cdiv(n, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)  # int64: row * stride overflows int32 past 2**31 elements
    cols = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(targets_ptr + row)
    grad = tl.zeros((BLOCK,), tl.float32)
    if target != ignore_index:
        dloss, dlse, lse = tl.load(dloss_ptr + row), tl.load(dlse_ptr + row), tl.load(lse_ptr + row)
        logits = tl.load(logits_ptr + row * stride + cols, mask=cols < n, other=0.0).to(tl.float32)
        grad = gradient(logits, cols, target, n, dloss, dlse, lse, label_smoothing, z_loss)
    tl.store(dlogits_ptr + row * n + cols, grad, mask=cols < n)


class CrossEntropyBackward(Kernel):
    archs = ARCHS
    Config = Config

    def default(self, call: LossCall) -> Config:
        return Config(block=min(triton.next_power_of_2(call.n), 4096), num_warps=4)

    def configs(self, call: LossCall) -> list[Config]:
        return [Config(block, warps) for block in (1024, 2048, 4096, 8192) for warps in (4, 8)]

    def launches(self, call: LossCall, config: Config) -> list[Launch]:
        m, n, stride = rows(call.logits)
        args = {"dloss_ptr": call.dloss, "dlse_ptr": call.dlse, "logits_ptr": call.logits, "targets_ptr": call.targets}
        args |= {"lse_ptr": call.lse, "dlogits_ptr": call.dlogits, "stride": stride, "n": n, **scalars(call)}
        programs, options = m * triton.cdiv(n, config.block), {"num_warps": config.num_warps}
        return [Launch(_cross_entropy_backward, programs, args, {"BLOCK": config.block}, options, pdl=True)]


cross_entropy, cross_entropy_backward = CrossEntropy(), CrossEntropyBackward()
