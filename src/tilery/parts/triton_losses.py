"""Cross entropy in Triton: a row's loss from its sums, and the gradient of a logit."""

import triton
import triton.language as tl

from tilery.parts.triton_softmax import base


@triton.jit
def log_sum(top, total):
    """log(sum(exp(x))) from max(x) and sum(exp(x - base(max(x))))."""
    return base(top) + tl.log(total)


@triton.jit
def loss(lse, picked, plain, n, label_smoothing, z_loss):
    """Return the loss of a row that is not ignored; `plain` is the sum of its n logits, `picked` its target's."""
    smooth = tl.where(label_smoothing > 0, label_smoothing * (plain / n), 0.0)
    return lse - (1 - label_smoothing) * picked - smooth + z_loss * lse * lse


@triton.jit
def gradient(logits, column, target, n, dloss, dlse, lse, label_smoothing, z_loss):
    """Return the gradients of the logits of classes `column`; NaN where the target, if not ignored, is no class."""
    dloss = tl.where((target >= 0) & (target < n), dloss, float("nan"))
    scale = dloss * (1 + 2 * z_loss * lse) + dlse
    hit = tl.where(column == target, dloss * (1 - label_smoothing), 0.0)
    return tl.exp(logits - lse) * scale - hit - dloss * label_smoothing / n
