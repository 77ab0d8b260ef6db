"""A program takes a block of one row: lse is known, so no element waits for another."""

from dataclasses import dataclass

import triton
import triton.language as tl

from tilery.base.spec import Artifact, TensorSpec
from tilery.hardware.device import ARCHS
from tilery.languages import triton_glue
from tilery.languages.triton_glue import take_over
from tilery.ops.cross_entropy_backward import outputs
from tilery.parts.rows import rows
from tilery.parts.triton_losses import gradient

archs = ARCHS


@dataclass(frozen=True)
class Config:
    block: int
    num_warps: int


def refusal(
    dloss: TensorSpec, dlse: TensorSpec, logits: TensorSpec, targets: TensorSpec, lse: TensorSpec,
    config: Config | None = None,
) -> str | None:  # fmt: skip
    return None


def default(dloss: TensorSpec, dlse: TensorSpec, logits: TensorSpec, targets: TensorSpec, lse: TensorSpec) -> Config:
    return Config(block=min(triton.next_power_of_2(logits.shape[-1]), 4096), num_warps=4)


def configs(
    dloss: TensorSpec, dlse: TensorSpec, logits: TensorSpec, targets: TensorSpec, lse: TensorSpec
) -> list[Config]:
    return [Config(block, warps) for block in (1024, 2048, 4096, 8192) for warps in (4, 8)]


@triton_glue.early
@triton.jit(do_not_specialize=["ignore_index"])
def _cross_entropy_backward(
    dloss_ptr, dlse_ptr, logits_ptr, targets_ptr, lse_ptr, out_ptr, stride, n, ignore_index, label_smoothing, z_loss,
    BLOCK: tl.constexpr,
):  # fmt: skip
    take_over()
    blocks = tl.cdiv(n, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)  # int64: row * stride overflows int32 past 2**31 elements
    cols = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(targets_ptr + row)
    grad = tl.zeros((BLOCK,), tl.float32)
    if target != ignore_index:
        dloss, dlse, lse = tl.load(dloss_ptr + row), tl.load(dlse_ptr + row), tl.load(lse_ptr + row)
        logits = tl.load(logits_ptr + row * stride + cols, mask=cols < n, other=0.0).to(tl.float32)
        grad = gradient(logits, cols, target, n, dloss, dlse, lse, label_smoothing, z_loss)
    tl.store(out_ptr + row * n + cols, grad, mask=cols < n)


def _arguments(outs, dloss, dlse, logits, targets, lse, label_smoothing=0.1, ignore_index=-100, z_loss=0.1):
    """The launch arguments, of tensors for `run` and of specs for `compile`."""
    _, n, stride = rows(logits)
    scalars = (ignore_index, float(label_smoothing), float(z_loss))
    return dloss, dlse, logits, targets, lse, outs[0], stride, n, *scalars


def compile(specs, config: Config, arch: str) -> Artifact:
    arguments, options = _arguments(outputs(*specs), *specs), {"num_warps": config.num_warps}
    return triton_glue.legacy_compile(_cross_entropy_backward, arguments, {"BLOCK": config.block}, options, arch)


def run(outs, args, config: Config) -> None:
    m, n, _ = rows(args[2])
    grid = (m * triton.cdiv(n, config.block),)
    arguments, options = _arguments(outs, *args), {"num_warps": config.num_warps}
    triton_glue.legacy_launch(_cross_entropy_backward, grid, arguments, {"BLOCK": config.block}, options)
