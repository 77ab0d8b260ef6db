"""Cross entropy in Triton: a row's loss from its sums, and the gradient of a logit."""

import triton
import triton.language as tl


@triton.jit
def log_sum(top, total):
    """log(sum(exp(x))) from max(x) and sum(exp(x - max(x)))."""
    return tl.where(top == float("inf"), top, top + tl.log(total))


@triton.jit
def loss(lse, picked, plain, n, label_smoothing, z_loss):
    """Of a row whose target is not to be ignored; `plain` is the sum of its n logits, `picked` its target's."""
    smooth = tl.where(label_smoothing > 0, label_smoothing * (plain / n), 0.0)
    return lse - (1 - label_smoothing) * picked - smooth + z_loss * lse * lse


@triton.jit
def gradient(logits, hits, n, dloss, dlse, lse, label_smoothing, z_loss):
    """Of logits whose target is not to be ignored; `hits` says which is the target's."""
    scale = dloss * (1 + 2 * z_loss * lse) + dlse
    return (
        tl.exp(logits - lse) * scale - tl.where(hits, dloss * (1 - label_smoothing), 0.0) - dloss * label_smoothing / n
    )
